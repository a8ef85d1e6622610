"""Claims of docs/dashboard.md, in a browser. Every test also claims that no request left and nothing was complained of
(`conftest.page`)."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.browser.conftest import Page


def _at_loss(page: Page) -> None:
    page.page.locator("#events button.lost").click()
    page.until("Object.values(page.at.regions).flat().some(d => d.state === 'lost')")


def test_a_finished_run(page: Page) -> None:
    shown = page.open("?run=a")
    assert shown.locator("#state").inner_text() == "done"
    assert page.figure("step") == "15 of 15"
    assert shown.locator(".device").count() == 6
    assert shown.locator("#stages tbody tr").count() == 5
    assert shown.locator("#loss canvas").count() == 1
    assert shown.title() == "a \u2013 Isthmus"


def test_a_lost_device_and_the_moment_before_it(page: Page) -> None:
    shown = page.open("?run=a")
    assert "lost" in page.class_of("home-1")
    _at_loss(page)
    assert shown.locator(".link.broken").count() >= 1
    red = shown.locator('[data-device="home-1"] .disc').evaluate("e => getComputedStyle(e).stroke")
    assert red == "rgb(201, 79, 0)"
    assert shown.locator('[data-device="home-1"] text').first.text_content() == "✕", "not by its colour alone"
    shown.keyboard.press("ArrowLeft")
    page.until("document.querySelector('[data-device=\"home-1\"]').classList.contains('working')")
    assert shown.locator(".link.broken").count() == 0
    assert shown.locator("#stages tbody tr").count() == 6


def test_the_slider(page: Page) -> None:
    shown = page.open("?run=a")
    shown.keyboard.press("Home")
    page.until("page.at.moment === 0")
    assert shown.locator("#live").get_attribute("aria-pressed") == "false"
    shown.keyboard.press("Shift+ArrowRight")
    page.until("page.at.moment > 0")
    shown.locator("#moment").fill("40")
    page.until("page.at.moment === 40")
    assert "step" in shown.locator("#when").inner_text()
    shown.keyboard.press("End")
    page.until("page.at.moment === page.run.moments - 1")
    assert shown.locator("#live").get_attribute("aria-pressed") == "true"


def test_the_timeline(page: Page) -> None:
    shown = page.open("?run=a")
    assert shown.locator('[data-part="predicted"]').count() and shown.locator('[data-part="measured"]').count()
    assert "predicted" in shown.locator("#timeline-note").inner_text()
    differs = shown.evaluate("page.bars.predicted.step_s !== page.bars.measured.step_s")
    assert differs
    step = int(shown.locator("#step").input_value())
    shown.keyboard.press("[")
    page.until(f"page.bars.step === {step - 1}")
    width = shown.evaluate("page.bars.to_s - page.bars.from_s")
    shown.keyboard.press("+")
    page.until(f"page.bars.to_s - page.bars.from_s < {width} * 0.6")
    shown.keyboard.press("0")
    page.until(f"page.bars.to_s - page.bars.from_s > {width} * 0.9")


def test_light_and_dark(page: Page) -> None:
    shown = page.open("?run=a")
    light = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    shown.keyboard.press("t")
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") != light
    shown.reload()
    shown.wait_for_selector("#bars svg")
    assert shown.evaluate("document.documentElement.dataset.theme") == "dark", "it is remembered"


def test_from_a_telephone_to_a_wall(page: Page) -> None:
    shown = page.open("?run=a")
    for width, height in ((390, 844), (768, 1024), (3840, 2160)):
        shown.set_viewport_size({"width": width, "height": height})
        shown.wait_for_timeout(250)
        assert shown.evaluate("document.documentElement.scrollWidth") <= width, f"{width} px: nothing is cut off"


def test_everything_is_reached_by_keyboard(page: Page) -> None:
    shown = page.open("?run=a")
    device = shown.locator('[data-device="home-0"]')
    device.focus()
    assert "home-0" in shown.locator("#tip").inner_text()
    assert "home-0" in device.get_attribute("aria-label")
    shown.keyboard.press("?")
    assert shown.locator("#help").is_visible()


def test_runs_side_by_side(page: Page) -> None:
    shown = page.open("", "#list table")
    assert shown.locator("#list .pill.broken").count() == 1
    for name in ("a", "b", "live"):
        shown.locator(f'#list input[value="{name}"]').check()
    shown.locator("#side-by-side").click()
    shown.wait_for_selector("#compared-2 canvas")
    assert shown.locator("#compare .card").count() == 3


def test_a_broken_run_says_so(page: Page) -> None:
    shown = page.open("?run=broken", "#problem:not([hidden])")
    assert "broken" in shown.locator("#problem").inner_text()
    assert shown.locator("#run").is_hidden()


def test_a_killed_device_turns_red_within_two_seconds(page: Page, runs: Path) -> None:
    shown = page.open("?run=live")
    assert "lost" not in page.class_of("cloud-1")
    entry = {"at_s": time.time(), "kind": "lost", "device": "cloud-1", "text": "its process was killed"}
    with (runs / "live" / "events.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
    page.until("document.querySelector('[data-device=\"cloud-1\"]').classList.contains('lost')", 2.0)
    assert "cloud-1 is lost" in shown.locator("#events button.lost").last.inner_text()


def test_half_a_million_spans_open_and_scroll(page: Page, runs: Path) -> None:
    folder = runs / "b"
    head, *lines = (folder / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "trace.jsonl").write_bytes(b"".join([head, *lines * (500_000 // len(lines))]))
    began = time.monotonic()
    shown = page.open("?run=b")
    took = time.monotonic() - began
    assert shown.evaluate("page.bars.spans") == 500_000
    shown.locator("#bars").hover()
    for _ in range(3):
        shown.mouse.wheel(0, 300)
    page.until("page.bars.to_s - page.bars.from_s > 0")
    print(f"opened in {took:.2f} s")
