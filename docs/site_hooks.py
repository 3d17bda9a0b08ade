"""Make pages that are written for a repository fit for a site; MkDocs calls these functions by their names.

Links that leave docs/ (records, tests, the licence) lead to copies of those files, below `repository/` of the site. A
list may follow a paragraph without an empty line, as it may in a repository's own view.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^)#\s]+)(#[^)]*)?(?=\))")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite a page before it is read."""
    from mkdocs.structure.files import File  # where the site is built; tests do not need it

    def lead_to_copy(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), match[1]))
        if target.startswith("docs/"):
            return match[0]
        # As text, so that it is shown as it is and not taken for a page of the site.
        copy = f"repository/{target}.txt" if target.endswith(".md") else f"repository/{target}"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(ROOT / target)))
        return posixpath.relpath(copy, posixpath.dirname(page.file.src_uri) or ".")

    return separate_lists(LINK.sub(lead_to_copy, markdown))


def separate_lists(markdown: str) -> str:
    """Put an empty line before a list that follows a line of text.

    >>> separate_lists("Two things:\\n- one\\n  goes on\\n- two")
    'Two things:\\n\\n- one\\n  goes on\\n- two'
    """
    lines: list[str] = []
    in_code, in_list = False, False
    for line in markdown.splitlines():
        in_code ^= line.lstrip().startswith("```")
        if not in_code and ITEM.match(line) and lines and lines[-1].strip() and not in_list:
            lines.append("")
        in_list = bool(ITEM.match(line)) or (in_list and line.startswith((" ", "\t")) and bool(line.strip()))
        lines.append(line)
    return "\n".join(lines)
