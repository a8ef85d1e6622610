"""From a telephone to a wall, light and dark, by keyboard, and for the colour-blind. Every test also claims that no
request left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Page, Served

SIZES = [(390, 844), (768, 1024), (1280, 720), (3840, 2160)]


def test_light_and_dark(page: Page) -> None:
    shown = page.open("?run=a")
    light = page.style("body", "background-color")
    shown.keyboard.press("t")
    assert page.style("body", "background-color") != light
    shown.reload()
    shown.wait_for_selector("#bars svg")
    assert shown.evaluate("document.documentElement.dataset.theme") == "dark", "it is remembered"


def test_dark_where_the_system_is(chromium: Any, _recorded: Served) -> None:
    context = chromium.new_context(color_scheme="dark")
    shown = Page(context.new_page(), _recorded.address)
    shown.open("?run=a")
    red, green, blue = (int(part) for part in shown.style("body", "background-color")[4:-1].split(","))
    assert max(red, green, blue) < 64
    assert shown.errors == []
    context.close()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_size(page: Page, width: int, height: int) -> None:
    page.page.set_viewport_size({"width": width, "height": height})
    shown = page.open("?run=a")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width, "nothing is cut off"
    outside = """[...document.querySelectorAll(".card, button, svg, canvas")].filter((e) => {
        const box = e.getBoundingClientRect();
        return box.width && (box.left < -1 || box.right > innerWidth + 1);
    }).map((e) => e.outerHTML.slice(0, 80))"""
    assert shown.evaluate(outside) == []
    font = float(page.style("body", "font-size").removesuffix("px"))
    assert font >= (14 if width < 3000 else 20), "read from where one sits"


def test_a_window_that_changes(page: Page) -> None:
    shown = page.open("?run=a")
    shown.set_viewport_size({"width": 600, "height": 900})
    page.until("document.querySelector('#loss canvas').getBoundingClientRect().width > 500")
    assert shown.evaluate("document.documentElement.scrollWidth") <= 600


def test_everything_is_reached_by_keyboard(page: Page) -> None:
    shown = page.open("?run=a")
    reached = set()
    for _ in range(120):
        shown.keyboard.press("Tab")
        reached.add(shown.evaluate("document.activeElement.dataset.device ?? document.activeElement.id"))
    assert {"home-0", "cloud-1", "moment", "theme", "step", "bars", "live"} <= reached


def test_what_has_the_focus_says_what_it_is(page: Page) -> None:
    shown = page.open("?run=a")
    device = shown.locator('#map [data-device="home-0"]')
    device.focus()
    assert "home-0" in shown.locator("#tip").inner_text()
    assert "stage 0" in device.get_attribute("aria-label")
    unnamed = """[...document.querySelectorAll('button, input')]
        .filter((e) => !e.innerText && !e.ariaLabel && !e.labels?.length)"""
    assert shown.evaluate(f"{unnamed}.length") == 0


def test_keys(page: Page) -> None:
    shown = page.open("?run=a")
    shown.keyboard.press("?")
    assert shown.locator("#help").is_visible()
    shown.keyboard.press("Escape")
    shown.keyboard.press("Home")
    page.until("page.at.moment === 0")
    shown.keyboard.press("ArrowRight")
    page.until("page.at.moment === 1")
    shown.keyboard.press("End")
    page.until("page.at.moment === page.run.moments - 1 && page.bars.step === 24")
    shown.keyboard.press("[")
    page.until("page.bars.step === 23")
    long = shown.evaluate("page.bars.to_s - page.bars.from_s")
    shown.keyboard.press("+")
    page.until(f"page.bars.to_s - page.bars.from_s < {long} * 0.6")
    shown.keyboard.press("0")
    page.until(f"page.bars.to_s - page.bars.from_s > {long} * 0.9")


def test_no_colour_says_anything_alone(page: Page) -> None:
    """As the colour-blind see it: in grey, states differ by a sign, a word or a pattern."""
    shown = page.open("?run=a")
    shown.locator("#events button.lost").click()
    page.until_device("home-1", "lost")
    lost, working = (
        shown.locator(f'#map [data-device="{name}"] .stage').text_content() for name in ("home-1", "home-0")
    )
    assert (lost, working) == ("✕", "‖"), "others wait for a new plan"
    dashes = {page.style(f".link.{state}", "stroke-dasharray") for state in ("broken", "used")}
    assert len(dashes) == 2
    assert "✕ lost" in shown.locator("#stages tr.lost").inner_text()
    assert shown.locator("#state").inner_text() == "done"
    legend = shown.locator("#bar-legend").inner_text()
    assert "forward" in legend and "backward" in legend


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(page: Page, theme: str) -> None:
    """4.5 to 1, as WCAG AA asks."""
    shown = page.open("?run=a")
    if theme == "dark":
        shown.keyboard.press("t")
    contrast = """(selector) => {
        const parts = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
        const linear = (x) => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
        const light = (c) => parts(c).map((x) => linear(x / 255))
            .reduce((sum, x, k) => sum + x * [.2126, .7152, .0722][k], 0);
        const e = document.querySelector(selector), card = document.querySelector(".card");
        const colours = [getComputedStyle(e).color, getComputedStyle(card).backgroundColor];
        const [a, b] = colours.map(light).sort((x, y) => y - x);
        return (a + .05) / (b + .05);
    }"""
    for selector in ("h2", "small", "#events time", "th", "td", "#figures dt", "#events .lost"):
        assert shown.evaluate(contrast, selector) >= 4.5, selector
