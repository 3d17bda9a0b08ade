"""Write the JSON schema of every document into docs/schemas: `python docs/make_schemas.py`."""

from __future__ import annotations

import json
from pathlib import Path

from stobatch.results import DOCUMENTS

FOLDER = Path(__file__).parent / "schemas"


def schemas() -> dict[str, str]:
    """Return the text of each schema by the name of its file."""
    return {
        f"{name}.json": json.dumps(document.schema_of_file(), indent=2, ensure_ascii=False) + "\n"
        for name, document in DOCUMENTS.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
