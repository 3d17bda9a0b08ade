"""`shard`: write a data set as shards that a training reads from disk, and look at such a folder."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from stobatch import data
from stobatch.config import RunConfig, require_config
from stobatch.data import Dataset, Manifest, ShardedExamples, Stream, find_repeated_records, write_shards
from stobatch.data.overlap import find_copies
from stobatch.data.shard_writing import require_room
from stobatch.data.shards import read_test
from stobatch.evaluation.tables import data_root
from stobatch.progress import progress
from stobatch.results import DatasetFacts, Dealt, RepeatedRecords, ShardFolder
from stobatch.seeds import Seeds

_SHOWN = 5
"""Repeated records whose positions are told; the rest is counted."""


def shard(
    config: RunConfig,
    out: str | Path,
    *,
    num_shards: int = 8,
    seed: int = 0,
    dataset: Dataset | Stream | None = None,
    quiet: bool = False,
) -> ShardFolder:
    """Write the configuration's data, or a data set or stream of your own, as a folder for `data.name=shards`.

    Image folders and streams are never held as a whole, so they may be larger than memory. The summary tells no
    checksum: those are private, like the data, and stand in the folder's manifest.
    """
    require_config(config)
    seeds = Seeds.reproducible(seed)
    source = dataset or _stream(config, Path(out), seeds, quiet)
    # Every record is written once and summed once.
    with progress("shard", 2 * (source.info.num_train + source.info.num_test), quiet=quiet) as advance:
        manifest = write_shards(source, Path(out), num_shards, seeds, advance=advance)
    return _summary(manifest)


def check_shards(folder: str | Path, *, quiet: bool = False) -> ShardFolder:
    """Read a whole folder: every file against its checksum, every value against its range, every record for a twin.

    Raises at the first file that is not what was written. A record that occurs twice is reported and not refused: two
    persons may look alike. If it is one person twice, the guarantee, which is per record, protects that person less.
    """
    manifest = Manifest.read(Path(folder))
    examples = ShardedExamples(manifest)
    starts = [rows.start for rows in examples.shards]
    with progress("check", len(examples), quiet=quiet) as advance:
        repeated = find_repeated_records(examples, advance=advance)
    across = [places for places in repeated if bisect_right(starts, places[0]) != bisect_right(starts, places[-1])]
    shown = tuple(tuple(places) for places in repeated[:_SHOWN])
    repeats = RepeatedRecords(count=len(repeated), in_more_than_one_shard=len(across), first_positions=shown)
    copies = len(find_copies(examples, read_test(manifest, manifest.info.num_test)))
    return _summary(manifest).replace(test_copies=copies, repeated_records=repeats)


def _stream(config: RunConfig, out: Path, seeds: Seeds, quiet: bool) -> Stream:
    require_room(out)  # sooner than the data is read
    with progress("read data", 1, quiet=quiet) as advance:
        source = data.stream(config.data, root=data_root(config), seeds=seeds)
        advance(1)
    return source


def _summary(manifest: Manifest) -> ShardFolder:
    return ShardFolder(
        folder=str(manifest.folder),
        dataset=DatasetFacts(**manifest.info.to_dict()),
        num_shards=len(manifest.shards),
        smallest_shard=min(shard.count for shard in manifest.shards),
        largest_shard=max(shard.count for shard in manifest.shards),
        encoding=manifest.encoding,
        dealt=Dealt(**manifest.dealt),
        bytes=manifest.num_bytes,
        test_copies=manifest.test_copies,
    )
