"""Take the README's picture of a report: `python docs/make_report_picture.py [RUN]`, with Chromium installed.

Shows the top of the report of RUN; without one, of `stobatch demo`, which trains the sound method with a secret seed on
the digits that the package ships (a minute or two on two cores).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

import stobatch

OUT = Path(__file__).parent / "figures" / "report.png"
WIDTH, HEIGHT = 1200, 975
MOST_BYTES = 200_000


def take_picture(page: Path, out: Path) -> None:
    """Save the top of a page as a PNG of few colours, which text and curves do not miss."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("There is no Chromium to take the picture with. Install one (Debian: apt-get install chromium).")
    size = f"--window-size={WIDTH},{HEIGHT}"
    flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", size, f"--screenshot={out}"]
    subprocess.run([browser, *flags, page.resolve().as_uri()], check=True, capture_output=True)
    with Image.open(out) as picture:
        few = picture.convert("RGB").crop((0, 0, WIDTH, HEIGHT)).quantize(64)
    few.save(out, optimize=True)
    if out.stat().st_size > MOST_BYTES:
        sys.exit(f"{out} has {out.stat().st_size:,} bytes, more than {MOST_BYTES:,}. Lower HEIGHT or the colours.")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "demo"
        if not run.exists():
            subprocess.run([sys.executable, "-m", "stobatch", "demo", "--out", str(run)], check=True)
        page = Path(stobatch.report([run], Path(folder) / "report.html").report)
        take_picture(page, OUT)


if __name__ == "__main__":
    main()
