"""Draws the pictures of docs/dashboard.md: `python -m tests.browser.pictures`, after `make test-browser`.

Of the recorded run of `tests/dashboard`, and of made-up rounds and a made-up fleet.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from isthmus.dashboard.run_folder import FleetSource, FolderSource
from tests.browser.conftest import CHROMIUM, Served
from tests.dashboard.folders import federated_run, recorded_run, served_fleet, slow_link

PICTURES = Path(__file__).parents[2] / "docs" / "dashboard"
COLOURS = 255
"""Flat areas need no more, and a picture is a third as large."""


def draw(browser: Any, name: str, address: str, *, act: str = "", width: int = 1280, dark: bool = False) -> None:
    """The whole page, as it is after the script `act`."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("main:not([hidden]) table")
    page.wait_for_timeout(1000)
    if act:
        page.evaluate(act)
        page.wait_for_timeout(1000)
    page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
    page.wait_for_timeout(1000)
    target = PICTURES / f"{name}.png"
    page.screenshot(path=str(target))
    Image.open(target).convert("P", palette=Image.Palette.ADAPTIVE, colors=COLOURS).save(target, optimize=True)
    context.close()
    print(f"{target}: {target.stat().st_size // 1024} KiB")


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        for run in ("first", "second", "third"):
            recorded_run(folder / "runs" / run)
        slow_link(folder / "runs" / "second", "office-1", "cloud-0")
        federated_run(folder / "runs" / "rounds", rounds=12)
        for seed in range(3):
            recorded_run(folder / "runs" / "rates" / f"lr-0.1-{seed}")
        state = served_fleet(folder / "state", folder / "runs" / "first")
        runs, fleet = Served(FolderSource(folder / "runs")), Served(FleetSource(state))
        browser = driver.chromium.launch(executable_path=CHROMIUM or shutil.which("chromium"), args=["--no-sandbox"])
        draw(browser, "fleet", f"{fleet.address}/")  # first, as the coordinator's status is soon out of date
        draw(browser, "run", f"{runs.address}/?run=first")
        lost = "document.querySelector('#events .lost').click()"
        draw(browser, "lost", f"{runs.address}/?run=second", act=lost, dark=True)
        draw(browser, "rounds", f"{runs.address}/?run=rounds")
        draw(browser, "compared", f"{runs.address}/?run=first&run=second&run=third")
        sweep = Served(FolderSource(folder / "runs" / "rates"))
        names = "&".join(f"run=lr-0.1-{seed}" for seed in range(3))
        pages = {"run": f"{runs.address}/?run=first", "rounds": f"{runs.address}/?run=rounds"}
        for name, address in {**pages, "sweep": f"{sweep.address}/?{names}"}.items():
            for width in (390, 1400):
                draw(browser, f"{name}-{width}", address, width=width)
        sweep.close()
        browser.close()
        runs.close()
        fleet.close()


if __name__ == "__main__":
    main()
