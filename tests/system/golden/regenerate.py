"""Write golden.json anew: `python tests/system/golden/regenerate.py`. For a change that is meant to move numbers."""

from __future__ import annotations

import json

from golden_run import FILE, compute


def main() -> None:
    FILE.write_text(json.dumps(compute(), indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
