"""Draw `docs/pictures/report.png`: `make look`, then `.venv-look/bin/python docs/make_report.py`.

The run takes half a minute. The picture shows the first screen of its page in headless Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
PICTURE = HERE / "pictures" / "report.png"
SCRIPT = HERE.parent / "examples" / "perceptron.py"
RUN = ("--workers", "4", "--servers", "1", "--pace", "0.07,0.07,0.07,0.21", "--sync", "bsp")
WIDTH, HEIGHT = 1280, 1010


def main() -> int:
    """Run the example with one slow worker, and draw its report. Return the exit code."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("this needs playwright; run: make look", file=sys.stderr)
        return 1
    if (chromium := shutil.which("chromium")) is None:
        print("this needs Chromium; install the package chromium", file=sys.stderr)
        return 1
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        shutil.copy(SCRIPT, folder)
        paceline = [sys.executable, "-m", "paceline"]
        subprocess.run(
            [*paceline, "run", *RUN, "--run-dir", "one-slow-worker", SCRIPT.name], check=True, cwd=folder
        )
        # The commands on this page name the run directory as it is given here.
        subprocess.run([*paceline, "report", "one-slow-worker"], check=True, cwd=folder)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(f"file://{folder}/one-slow-worker/report.html")
        page.get_by_role("heading", name="Timeline").wait_for()
        page.screenshot(path=PICTURE)
        browser.close()
    print(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
