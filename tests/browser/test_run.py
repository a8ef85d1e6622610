"""One run. Every test also claims that no request left and that nothing was complained of (`conftest.page`)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from isthmus.dashboard.run_folder import WatchedRun
from tests.browser.conftest import Page, Serve, limit_s
from tests.dashboard.folders import recorded_run, slow_link


def _until_first(page: Page, kind: str) -> None:
    """Until the moment is that of the first such event of the recorded run."""
    page.until(f"page.at.moment === page.run.marks.find((mark) => mark.kind === '{kind}').moment")


def _at_loss(page: Page) -> None:
    page.page.locator("#events button.lost").click()
    _until_first(page, "lost")


def test_a_finished_run(page: Page) -> None:
    shown = page.open("?run=a")
    assert shown.locator("#state").inner_text() == "done"
    assert "24 of 24" in page.figure("step")
    assert shown.locator(".device").count() == 6
    assert shown.locator("#stages tbody tr").count() == 5
    assert shown.locator("#loss canvas").count() == 1
    assert shown.title() == "a \u2013 Isthmus"


def test_a_lost_device_is_red_and_crossed_out(page: Page) -> None:
    shown = page.open("?run=a")
    _at_loss(page)
    page.until_device("home-1", "lost")
    assert page.style('[data-device="home-1"] .disc', "stroke") == "rgb(201, 79, 0)"
    assert shown.locator('[data-device="home-1"] text').first.text_content() == "✕", "not by its colour alone"
    assert "home-1 is lost" in shown.locator("#events .now").inner_text()


def test_the_slider_shows_the_moment_before_a_loss(page: Page) -> None:
    shown = page.open("?run=a")
    _at_loss(page)
    shown.keyboard.press("ArrowLeft")
    page.until_device("home-1", "working")
    assert shown.locator(".link.broken").count() == 0
    assert shown.locator("#stages tbody tr").count() == 6


def test_the_slider_goes_anywhere(page: Page) -> None:
    shown = page.open("?run=a")
    shown.locator("#moment").fill("20")
    page.until("page.at.moment === 20")
    assert "step" in shown.locator("#when").inner_text()
    assert shown.locator("#live").get_attribute("aria-pressed") == "false"
    shown.locator("#live").click()
    page.until("page.at.moment === page.run.moments - 1")
    assert shown.locator("#live").get_attribute("aria-pressed") == "true"


def test_figures_are_of_the_moment(page: Page) -> None:
    shown = page.open("?run=a")
    last = page.figure("loss")
    shown.locator("#moment").fill("20")
    page.until("page.at.moment === 20")
    page.until(f"document.querySelector('[data-figure=loss]').innerText !== {last!r}")
    assert "24 of 24" not in page.figure("step")


def test_a_change_of_plan(page: Page) -> None:
    shown = page.open("?run=a")
    _at_loss(page)
    assert "plan 1:" in shown.locator("#map-note").inner_text()
    shown.keyboard.press("Shift+ArrowRight")
    page.until("page.at.plans === 2")
    assert "plan 2:" in shown.locator("#map-note").inner_text()
    assert "plan over" in shown.locator("#events .now").inner_text()
    assert "home-1" not in shown.locator("#stages").inner_text()
    assert shown.locator("#ticks .planned").count() == 2


def test_a_broken_link(page: Page) -> None:
    shown = page.open("?run=a")
    _at_loss(page)
    broken = shown.locator(".link.broken")
    assert broken.count() >= 1
    assert "broken" in broken.first.get_attribute("aria-label")
    assert page.style(".link.broken", "stroke-dasharray") != "none"
    assert "✕ broken" in shown.locator("#map").inner_text()


def test_a_slow_link(page: Page, serve: Serve, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "slow")
    slow_link(run, "office-1", "cloud-0")
    shown = page.open(of=serve(run))
    slow = shown.locator(".link.slow")
    assert slow.count() == 1 and "office-1" in slow.get_attribute("data-link")
    assert "slower than planned" in slow.get_attribute("aria-label")
    assert "▼" in shown.locator("#map").inner_text()
    assert page.style(".link.slow", "stroke-dasharray") != page.style(".link.used", "stroke-dasharray")


def test_links_show_measured_against_planned(page: Page) -> None:
    shown = page.open("?run=a")
    assert shown.locator(".label").count() == 2
    assert " of 20 Mbit/s" in shown.locator("#map").inner_text()


def test_stages_show_planned_and_measured(page: Page) -> None:
    shown = page.open("?run=a")
    row = shown.locator("#stages tbody tr").first
    assert row.locator("[data-tip^=busy]").get_attribute("data-tip").count("%") == 2
    assert "planned" in row.locator("[data-tip^=planned]").get_attribute("data-tip")
    assert "measured" in row.locator("[data-tip^=planned]").get_attribute("data-tip")


def test_predicted_and_measured_differ_where_the_summary_says_so(page: Page) -> None:
    shown = page.open("?run=a")
    shown.locator("#step").fill("10")
    shown.locator("#step").press("Enter")
    page.until("page.bars.step === 10")
    ends = {e.get_attribute("data-part"): float(e.get_attribute("x1")) for e in shown.locator("#bars line.end").all()}
    summary = WatchedRun(Path(shown.evaluate("page.run.folder"))).summary
    assert summary is not None and abs(summary.error) > 0.05
    assert (ends["predicted"] < ends["measured"]) == (summary.error < 0)
    figure = page.figure("step time")
    assert f"{summary.measured_step_s * 1e3:.0f} ms" in figure
    assert f"predicted {summary.predicted_step_s * 1e3:.0f} ms" in figure
    side = "less" if summary.error < 0 else "more"
    assert f"predicted {side} by" in shown.locator("#timeline-note").inner_text()


def test_a_step_that_was_done_twice_shows_the_one_that_counts(page: Page) -> None:
    shown = page.open("?run=a")
    shown.locator("#step").fill("10")
    shown.locator("#step").press("Enter")
    page.until("page.bars.step === 10")
    assert "home-1" not in shown.locator("#bars").inner_text()
    _at_loss(page)
    page.until("page.bars.step === 12")
    shown.locator("#step").fill("10")
    shown.locator("#step").press("Enter")
    page.until("page.bars.step === 10 && document.getElementById('bars').textContent.includes('home-1')")


def test_bars_say_what_they_are(page: Page) -> None:
    shown = page.open("?run=a")
    shown.locator("#bars").scroll_into_view_if_needed()
    bar = shown.locator('#bars path[data-part="measured"][data-kind="F"]').first
    box = bar.evaluate("e => { const b = e.getBoundingClientRect(); return [b.x + 1, b.y + b.height / 2]; }")
    shown.mouse.move(*box)
    page.until("!document.getElementById('tip').hidden")
    assert "forward" in shown.locator("#tip").inner_text()


def test_the_timeline_moves_by_mouse(page: Page) -> None:
    shown = page.open("?run=a")
    shown.locator("#bars").scroll_into_view_if_needed()
    x, y, width = (shown.locator("#bars").bounding_box()[key] for key in ("x", "y", "width"))
    long = shown.evaluate("page.bars.to_s - page.bars.from_s")
    shown.mouse.move(x + width / 2, y + 60)
    shown.mouse.wheel(0, -300)
    page.until(f"page.bars.to_s - page.bars.from_s < {long} * 0.9")
    before = shown.evaluate("page.bars.from_s")
    shown.mouse.down()
    shown.mouse.move(x + width / 4, y + 60)
    shown.mouse.up()
    page.until(f"page.bars.from_s > {before}")


def test_an_event_brings_its_moment(page: Page) -> None:
    shown = page.open("?run=a")
    shown.locator("#events button.planned").first.click()
    _until_first(page, "planned")
    assert shown.locator("#events .future").count() > 10


@pytest.mark.parametrize("part", ["opens", "scrolls"])
def test_half_a_million_spans(page: Page, serve: Serve, tmp_path: Path, part: str) -> None:
    run = recorded_run(tmp_path / "long")
    head, *lines = (run / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (run / "trace.jsonl").write_bytes(b"".join([head, *lines * (500_000 // len(lines))]))
    served, began_s = serve(run), time.monotonic()
    shown = page.open(of=served)
    took_s = time.monotonic() - began_s
    assert shown.evaluate("page.bars.spans") > 490_000
    if part == "opens":
        print(f"opened in {took_s:.2f} s")
        assert took_s < limit_s(3.0)
        return
    shown.locator("#bars").focus()
    for key in ("+", "ArrowRight", "ArrowRight", "-"):
        before = shown.evaluate("`${page.bars.from_s}:${page.bars.to_s}`")
        shown.keyboard.press(key)
        page.until(f"`${{page.bars.from_s}}:${{page.bars.to_s}}` !== '{before}'")
    assert shown.locator("#bars path").count() < 400
