from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from stobatch.data.download import fetch_folder
from stobatch.errors import DataError

BY_HAND = "Put it there."


def tar(path: Path, members: dict[str, bytes], link: str = "") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            item = tarfile.TarInfo(name)
            item.size = len(content)
            archive.addfile(item, io.BytesIO(content))
        if link:
            item = tarfile.TarInfo(link)
            item.type, item.linkname = tarfile.SYMTYPE, "/"
            archive.addfile(item)
    return path


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("folder/", b"")
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def fetch(archive: Path, target: Path, md5: str | None = None) -> None:
    digest = md5 or hashlib.md5(archive.read_bytes()).hexdigest()
    fetch_folder(archive.as_uri(), digest, target, by_hand=BY_HAND)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "data" / "folder"


def nothing_left(target: Path) -> bool:
    return not target.parent.exists() or list(target.parent.iterdir()) == []


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_an_archive_appears_as_its_folder_and_nothing_else(tmp_path: Path, target: Path, kind: str) -> None:
    pack = {"tar.gz": tar, "zip": zipped}[kind]
    fetch(pack(tmp_path / f"a.{kind}", {"folder/x": b"1", "folder/deep/y": b"2"}), target)
    assert (target / "x").read_bytes() == b"1"
    assert (target / "deep" / "y").read_bytes() == b"2"
    assert list(target.parent.iterdir()) == [target]


def test_what_is_there_is_left_alone(tmp_path: Path, target: Path) -> None:
    target.mkdir(parents=True)
    fetch_folder("file:///nowhere", "", target, by_hand=BY_HAND)
    assert list(target.iterdir()) == []


def test_a_wrong_digest_unpacks_nothing(tmp_path: Path, target: Path, fails) -> None:
    archive = tar(tmp_path / "a.tar.gz", {"folder/x": b"1"})
    assert "not the published archive" in fails(fetch, archive, target, "0" * 32)
    assert nothing_left(target)


@pytest.mark.parametrize("name", ["../../evil", "/evil-from-root", "folder/../../evil"])
@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_members_do_not_leave_the_folder(tmp_path: Path, target: Path, name: str, kind: str) -> None:
    pack = {"tar.gz": tar, "zip": zipped}[kind]
    with suppress(DataError):
        fetch(pack(tmp_path / f"a.{kind}", {"folder/x": b"1", name: b"2"}), target)
    assert {path for path in tmp_path.rglob("evil*") if not path.is_relative_to(target)} == set()
    assert not Path("/evil-from-root").exists()


def test_links_out_of_the_folder_are_refused(tmp_path: Path, target: Path, fails) -> None:
    fails(fetch, tar(tmp_path / "a.tar.gz", {"folder/x": b"1"}, link="folder/link"), target)
    assert nothing_left(target)


def test_no_network_gives_the_remedy(tmp_path: Path, target: Path, fails) -> None:
    message = fails(fetch, tmp_path / "missing.tar.gz", target, "0" * 32)
    assert message.endswith(BY_HAND)
    assert nothing_left(target)


def test_broken_or_foreign_archives(tmp_path: Path, target: Path, fails) -> None:
    whole = tar(tmp_path / "a.tar.gz", {"folder/x": bytes(range(256)) * 99})
    (tmp_path / "half.tar.gz").write_bytes(whole.read_bytes()[:150])
    (tmp_path / "text.tar.gz").write_text("hello")
    for archive in (tmp_path / "half.tar.gz", tmp_path / "text.tar.gz", tar(tmp_path / "b.tar.gz", {"other/x": b""})):
        assert fails(fetch, archive, target).endswith(BY_HAND)
        assert nothing_left(target)
