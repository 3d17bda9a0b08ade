"""Collect audits into records: `python results/collect_audits.py RUN... > results/audits.json`.

A record is a run's claim, what each instrument found, and how long it took; nothing private is read.
"""

import json
import sys
from pathlib import Path

from stobatch.runs import Run


def record(path: Path) -> dict[str, object]:
    run = Run(path)
    document, audit = run.read("config"), run.read("audit")
    config = document["config"]
    return {
        "name": path.name,
        "config_hash": document["training_hash"],
        "method": config["method"]["name"],
        "verdict": audit["verdict"],
        "findings": [
            {**finding, "settings": run.read(f"evidence/{finding['instrument']}")["settings"]}
            for finding in audit["findings"]
        ],
    }


print(json.dumps([record(Path(path)) for path in sys.argv[1:]], indent=1))
