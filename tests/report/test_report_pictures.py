from __future__ import annotations

import itertools
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from synthetic_pipeline import make_fleet, make_plan, play

from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.plans import Plan
from isthmus.report import draw_loss, draw_timeline
from isthmus.report.timeline import BACKWARD, EVALUATION, FORWARD, UPDATE, smoothed
from isthmus.trace import Trace


def pixels(path: Path) -> np.ndarray:
    """Height, width, and 8-bit red, green, blue."""
    assert path.read_bytes().startswith(b"\x89PNG")
    return np.round(imread(path)[..., :3] * 255).astype(np.uint8)


def columns_of(image: np.ndarray, colour: str) -> np.ndarray:
    """Which pixel columns hold the colour."""
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return (image == np.array(rgb)).all(axis=-1)


def share(image: np.ndarray, colour: str) -> float:
    return float(columns_of(image, colour).mean())


def test_timeline_of_four_devices(predicted: Trace, measured: Trace, tmp_path: Path) -> None:
    draw_timeline(predicted, measured, tmp_path / "timeline.png")
    image = pixels(tmp_path / "timeline.png")
    height, width, _ = image.shape
    assert width >= 2000
    assert 1.3 < width / height < 2.0
    # Backward takes twice as long as forward, an update as long as one forward of eight.
    assert share(image, BACKWARD) > share(image, FORWARD) > share(image, UPDATE) > 0.001
    assert share(image, EVALUATION) == 0


def test_notes_stand_below_the_timeline(predicted: Trace, measured: Trace, tmp_path: Path) -> None:
    draw_timeline(predicted, measured, tmp_path / "plain.png")
    draw_timeline(predicted, measured, tmp_path / "noted.png", notes=["too slow to emulate oslo", "and rome"])
    plain, noted = pixels(tmp_path / "plain.png"), pixels(tmp_path / "noted.png")
    assert noted.shape[0] == pytest.approx(plain.shape[0] + 2 * 0.18 * 200, abs=2)
    draw_timeline(predicted, measured, tmp_path / "many.png", notes=[f"too slow to emulate {k}" for k in range(99)])
    assert pixels(tmp_path / "many.png").shape[0] == pytest.approx(plain.shape[0] + 4 * 0.18 * 200, abs=2)
    foot = noted[plain.shape[0] - 10 :]
    assert (foot.sum(axis=-1) < 300).mean() > 0.001, "they are written there"


def test_both_panels_start_at_the_same_place(predicted: Trace, measured: Trace, tmp_path: Path) -> None:
    draw_timeline(predicted, measured, tmp_path / "timeline.png")
    image = pixels(tmp_path / "timeline.png")
    forward = columns_of(image, FORWARD)
    height = len(image)
    # The legend's patch is in the top eighth.
    upper, lower = forward[height // 8 : height // 2], forward[height // 2 :]
    starts = [int(np.flatnonzero(panel.any(axis=0))[0]) for panel in (upper, lower)]
    assert abs(starts[0] - starts[1]) <= 2


def test_measured_alone_is_about_half_as_high(predicted: Trace, measured: Trace, tmp_path: Path) -> None:
    draw_timeline(predicted, measured, tmp_path / "both.png")
    draw_timeline(None, measured, tmp_path / "one.png")
    both, one = (pixels(tmp_path / name).shape for name in ("both.png", "one.png"))
    assert 0.5 < one[0] / both[0] < 0.7
    assert one[1] == both[1]


def test_size_scales_with_devices(tmp_path: Path) -> None:
    fleet = make_fleet(16)
    plan = make_plan(fleet, 8)
    trace = play(plan, fleet, steps=3)
    draw_timeline(None, trace, tmp_path / "16.png")
    height, width, _ = pixels(tmp_path / "16.png").shape
    assert height > 16 * 0.4 * 200
    assert width > 2000


def test_evaluation_is_drawn_when_it_falls_between_the_steps(plan: Plan, fleet: Fleet, tmp_path: Path) -> None:
    draw_timeline(None, play(plan, fleet, steps=3, eval_after=1), tmp_path / "eval.png")
    assert share(pixels(tmp_path / "eval.png"), EVALUATION) > 0.005


def test_a_steady_step_is_drawn_not_the_one_with_the_evaluation(plan: Plan, fleet: Fleet, tmp_path: Path) -> None:
    draw_timeline(None, play(plan, fleet, steps=8, eval_after=2), tmp_path / "steady.png")
    assert share(pixels(tmp_path / "steady.png"), EVALUATION) == 0


def test_a_run_of_one_step_is_drawn(plan: Plan, fleet: Fleet, tmp_path: Path) -> None:
    draw_timeline(None, play(plan, fleet, steps=1), tmp_path / "one.png")
    assert share(pixels(tmp_path / "one.png"), FORWARD) > 0.01


@pytest.mark.parametrize("tail_s", [0.0, 0.2, 1.0, 30.0])
def test_texts_above_a_panel_do_not_touch(
    plan: Plan, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail_s: float
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    trace = play(plan, fleet, steps=5)
    last = msgspec.structs.replace(trace.spans[-1], track="send")
    late = [msgspec.structs.replace(last, end_s=last.end_s + tail_s, step=step) for step in (1, 2, 3)]
    trace = msgspec.structs.replace(trace, spans=(*trace.spans, *late))
    draw_timeline(trace, trace, tmp_path / "t.png", steps=3)
    (figure,) = figures
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        boxes = [
            text.get_window_extent(renderer)
            for text in axes.texts
            if text.get_text() == "busy" or text.get_text().startswith(("step", "measured", "predicted"))
        ]
        assert len(boxes) >= 2
        assert not [1 for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]


def test_dollars_and_long_names_are_drawn_as_they_are(plan: Plan, fleet: Fleet, tmp_path: Path) -> None:
    trace = play(plan, fleet, steps=2)
    renamed = tuple(msgspec.structs.replace(span, device=f"$\\frac{span.device}$" * 8) for span in trace.spans)
    draw_timeline(None, msgspec.structs.replace(trace, spans=renamed), tmp_path / "names.png")
    assert pixels(tmp_path / "names.png").shape[1] < 3000


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_to_draw(measured: Trace, tmp_path: Path, steps: int) -> None:
    with pytest.raises(UserError, match="steps: got"):
        draw_timeline(None, measured, tmp_path / "none.png", steps)


def test_no_step_in_the_trace(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no training step"):
        draw_timeline(None, Trace(source="runtime", run="none", spans=()), tmp_path / "none.png")


def test_loss(tmp_path: Path) -> None:
    points = [(i, 3 + 5 * math.exp(-i / 50) + 0.1 * math.sin(i)) for i in range(400)]
    held_out = [(i, 3.2 + 5 * math.exp(-i / 50)) for i in range(100, 401, 100)]
    draw_loss(points, held_out, tmp_path / "loss.png", references={"unigram": 6.5, "no $such": math.nan})
    image = pixels(tmp_path / "loss.png")
    assert image.shape[:2] == (900, 1500)
    assert share(image, "#0072B2") > 0.002
    assert share(image, "#D55E00") > 0.0005


def test_loss_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    draw_loss([(0, math.inf), (1, 3.0), (2, math.nan), (3, 2.0)], [], tmp_path / "loss.png")
    assert share(pixels(tmp_path / "loss.png"), "#0072B2") > 0.0005
    with pytest.raises(UserError, match="no finite loss"):
        draw_loss([(0, math.nan)], [], tmp_path / "none.png")


def test_loss_that_falls_far_is_drawn_on_a_logarithmic_axis(tmp_path: Path) -> None:
    # Its curve is a straight line there, and lies along the bottom of a linear axis.
    draw_loss([(i, 10 ** (-i / 100)) for i in range(500)], [], tmp_path / "loss.png")
    rows, columns = np.nonzero(columns_of(pixels(tmp_path / "loss.png")[100:], "#0072B2"))
    assert abs(np.corrcoef(rows, columns)[0, 1]) > 0.999


def test_smoothed_is_a_mean_that_follows_a_slope_at_the_start_and_ignores_one_step_at_the_end() -> None:
    slope = np.arange(20, dtype=float)
    np.testing.assert_allclose(smoothed(slope, 5)[:18], slope[:18])
    spike = np.zeros(20)
    spike[-1] = 3.0
    assert smoothed(spike, 5)[-1] == pytest.approx(1.0)
    np.testing.assert_allclose(smoothed(slope, 1), slope)
