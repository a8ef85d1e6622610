"""Lists, runs side by side, fleets, rounds, and what is no run. Every test also claims that no request left."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.browser.conftest import Page, Serve
from tests.dashboard.folders import federated_run, recorded_run, served_fleet


def test_the_list_says_how_each_run_is(page: Page) -> None:
    shown = page.open(ready="#list table")
    assert shown.locator("#list .pill.done").count() == 3
    assert "broken" in shown.locator("#list tr", has_text="broken").inner_text()
    shown.locator("#list a", has_text=re.compile("^b$")).click()
    shown.wait_for_selector("#bars svg")


def test_three_runs_side_by_side(page: Page) -> None:
    shown = page.open(ready="#list table")
    for name in ("a", "b", "c"):
        shown.locator(f'#list input[value="{name}"]').check()
    shown.locator("#side-by-side").click()
    shown.wait_for_selector("#compared-2 canvas")
    cards = shown.locator("#compare .card").all()
    lefts = [card.bounding_box()["x"] for card in cards]
    assert len(cards) == 3 and lefts == sorted(set(lefts)), "beside each other, not below"
    assert "24 of 24 steps" in cards[1].inner_text()


def test_runs_of_both_kinds_side_by_side(page: Page, serve: Serve, tmp_path: Path) -> None:
    recorded_run(tmp_path / "a")
    federated_run(tmp_path / "f")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "job.json").write_text("{")
    shown = page.open("?run=a&run=f&run=x", "#compared-1 canvas", of=serve(tmp_path))
    assert "5 of 5 rounds" in shown.locator("#compare").inner_text()
    assert "The run is broken" in shown.locator("#compare .card").last.inner_text()


def test_a_broken_run_says_what_is_missing(page: Page, serve: Serve, tmp_path: Path) -> None:
    recorded_run(tmp_path / "a")
    (tmp_path / "a" / "fleet.json").write_text("{")
    shown = page.open(of=serve(tmp_path / "a"), ready="#problem:not([hidden])")
    assert "The run is broken: fleet.json cannot be read." in shown.locator("#problem").inner_text()
    assert shown.locator("#run").is_hidden()


def test_an_empty_folder_says_so_and_shows_a_run_that_begins(page: Page, serve: Serve, tmp_path: Path) -> None:
    shown = page.open(of=serve(tmp_path), ready="#list .card")
    assert "There is no run here yet" in shown.locator("#list").inner_text()
    recorded_run(tmp_path / "new")
    shown.wait_for_selector("#bars svg")
    assert shown.locator("#list").is_hidden()


def test_a_remote_run_says_where_its_devices_are(page: Page, serve: Serve, tmp_path: Path) -> None:
    recorded_run(tmp_path / "a")
    (tmp_path / "a" / "captured.safetensors").touch()
    assert "on remote devices of a fleet" in page.open(of=serve(tmp_path / "a")).locator("#facts").inner_text()


def test_lines_that_cannot_be_read_are_counted(page: Page, serve: Serve, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "a")
    with (run / "losses.jsonl").open("a") as file:
        file.write("nonsense\n")
    assert "1 lines could not be read" in page.open(of=serve(run)).locator("#facts").inner_text()


def test_federated_rounds(page: Page, serve: Serve, tmp_path: Path) -> None:
    shown = page.open(of=serve(federated_run(tmp_path / "f")))
    assert "5 of 5" in page.figure("round") and "80 %" in page.figure("accuracy")
    assert "2.5" in page.figure("epsilon") and "at remote sites" in shown.locator("#facts").inner_text()
    for chart in ("loss", "metric-0", "metric-1"):
        assert shown.locator(f"#{chart} canvas").count() == 1
    legend = shown.locator("#metric-0 .u-legend").inner_text()
    assert all(name in legend for name in ("mean of clients", "worst tenth", "held out", "north", "south"))
    assert "80 %" in legend and "\N{EN DASH}" not in legend  # the values of the round that is shown
    assert "74 %" in page.figure("accuracy of clients") and "worst tenth 64 %" in page.figure("accuracy of clients")


def test_of_many_clients_no_one_has_a_line(page: Page, serve: Serve, tmp_path: Path) -> None:
    shown = page.open(of=serve(federated_run(tmp_path / "f", clients=12)))
    legend = shown.locator("#metric-0 .u-legend").inner_text()
    assert "worst tenth" in legend and "client 3" not in legend
    assert shown.locator("#map").is_hidden()


def test_a_federated_round_of_the_past(page: Page, serve: Serve, tmp_path: Path) -> None:
    shown = page.open(of=serve(federated_run(tmp_path / "f")))
    shown.locator("#moment").fill("5")
    page.until("page.bars?.step === 3")
    assert "1 refused, 1 reassigned, 1 missing" in page.figure("clients")
    row = shown.locator("#rounds tbody tr").nth(2)
    assert row.inner_text().split() == ["3", "3", "2", "s", "1.1", "s", "1", "1", "1", "0", "quorum"]
    assert row.get_attribute("data-tip") == "client 4: not finite"


def test_a_round_against_its_forecast(page: Page, serve: Serve, tmp_path: Path) -> None:
    shown = page.open(of=serve(federated_run(tmp_path / "f")))
    assert "forecast 1.1 s" in shown.locator("#bars").inner_text()
    forecast = float(shown.locator("#bars .forecast").get_attribute("x1"))
    end = shown.locator("#bars path.client").first.evaluate("e => { const b = e.getBBox(); return b.x + b.width; }")
    assert forecast < end, "the round took longer"


@pytest.fixture
def fleet(serve: Serve, tmp_path: Path) -> object:
    state = served_fleet(tmp_path / "state", recorded_run(tmp_path / "a"))
    return serve(importlib.import_module("isthmus.dashboard.run_folder").FleetSource(state))


def test_a_fleet(page: Page, fleet: object) -> None:
    shown = page.open(of=fleet, ready="#list table")  # pyright: ignore[reportArgumentType]
    text = shown.locator("#list").inner_text()
    assert shown.locator("#state").inner_text() == "serving"
    assert all(name in text for name in ("ann", "bob", "eve", "at work", "idle", "direct", "relayed", "1 MiB"))
    states = [shown.locator("#list tr", has_text=name).first.inner_text() for name in ("later", "wrong", "recorded")]
    assert "queued" in states[0] and "no data" in states[1] and "done" in states[2]


def test_a_run_of_a_fleet(page: Page, fleet: object) -> None:
    shown = page.open(of=fleet, ready="#list table")  # pyright: ignore[reportArgumentType]
    shown.locator("#list a", has_text="recorded").first.click()
    shown.wait_for_selector("#bars svg")
    assert "24 of 24" in page.figure("step")


def test_a_fleet_whose_coordinator_is_gone(page: Page, serve: Serve, tmp_path: Path) -> None:
    state = served_fleet(tmp_path / "state", recorded_run(tmp_path / "a"))
    (state / "status.json").unlink()
    source = importlib.import_module("isthmus.dashboard.run_folder").FleetSource(state)
    assert page.open(of=serve(source), ready="#list table").locator("#state").inner_text() == "no coordinator serves it"
