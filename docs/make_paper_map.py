"""Write docs/paper-map.md from the registry: `python docs/make_paper_map.py`. A test compares the two."""

from pathlib import Path

from stobatch.paper import items

HEAD = """# Paper map

Every numbered item of the paper, its one home in the code, and whether it holds. `stobatch where "Theorem 5"` prints
the file and the line. Made by `python docs/make_paper_map.py`. Steps of one proof share its home.

| item | code | verdict |
|---|---|---|
"""

rows = [f"| {name} | `{item.code}` | {item.verdict} |" for name, item in items().items()]
Path(__file__).with_name("paper-map.md").write_text(HEAD + "\n".join(rows) + "\n")
