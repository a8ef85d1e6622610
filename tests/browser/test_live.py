"""Runs that work. Every test also claims that no request left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from tests.browser.conftest import Page, Serve, limit_s
from tests.dashboard.folders import add_entry, recorded_run
from tests.runtime.commands import COMMAND, devices_of, edited, write_job


def test_a_line_of_a_loss_turns_its_device_red_within_two_seconds(page: Page, serve: Serve, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "live")
    shown = page.open(of=serve(run))
    add_entry(run, kind="lost", device="cloud-1", text="its process was killed")
    page.until_device("cloud-1", "lost", limit_s(2.0))
    assert "cloud-1 is lost: its process was killed" in shown.locator("#events button.lost").last.inner_text()


def test_a_step_that_is_done_is_followed(page: Page, serve: Serve, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "live")
    page.open(of=serve(run))
    add_entry(run, kind="step", step=25, loss=0.125, figures={"tokens_per_s": 512.0})
    page.until("document.querySelector('[data-figure=loss]').innerText.includes('0.125')")
    assert "512" in page.figure("tokens/s")


def test_who_looks_at_the_past_is_not_brought_to_the_present(page: Page, serve: Serve, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "live")
    shown = page.open(of=serve(run))
    shown.locator("#moment").fill("20")
    page.until("page.at.moment === 20")
    moments = shown.evaluate("page.run.moments")
    add_entry(run, kind="lost", device="cloud-1")
    page.until(f"page.run.moments === {moments + 1} && page.at.moment === 20")
    page.until_device("cloud-1", "working")


def test_a_device_that_is_killed_turns_red_within_two_seconds(page: Page, tmp_path: Path) -> None:
    """A real run with `--dashboard`, whose page shows it."""
    job = edited(write_job(tmp_path, steps=4000, fleet="three-sites"), ("eval_every = 5", "eval_every = 0"))
    with (tmp_path / "err").open("wb") as err:
        run = subprocess.Popen([*COMMAND, "train", str(job), "--dashboard"], stdout=err, stderr=err, cwd=tmp_path)
    try:
        address = _printed(tmp_path / "err", run)
        shown = page.page
        page.address = address
        shown.goto(f"{address}/")
        page.until("page.at?.step >= 1 && page.at.regions", 300.0)
        assert shown.locator("#state").inner_text() == "running" and shown.title().startswith("●")
        name, pid = sorted(devices_of(run.pid).items())[0]
        page.until_device(name, "working")
        limit = limit_s(2.0)
        os.kill(pid, signal.SIGKILL)
        page.until_device(name, "lost", limit)
        assert f"{name} is lost" in shown.locator("#events button.lost").last.inner_text()
        run.send_signal(signal.SIGINT)
        assert run.wait(300) == 130
        page.until("document.getElementById('state').textContent.includes('does not answer')")
    finally:
        run.kill()
        run.wait()
    page.errors.clear()  # of the page's server, which ended with the run


def _printed(err: Path, run: subprocess.Popen[bytes]) -> str:
    deadline_s = time.monotonic() + 300
    while not (found := re.search(r"dashboard: (http://127\.0\.0\.1:\d+)/", err.read_text())):
        assert run.poll() is None and time.monotonic() < deadline_s, err.read_text()
        time.sleep(0.05)
    return found[1]
