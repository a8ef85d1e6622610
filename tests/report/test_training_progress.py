from __future__ import annotations

import io
import sys
from itertools import pairwise

import pytest
from rich.console import Console

from isthmus.callbacks import Evaluated, StepDone
from isthmus.report import Progress


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def plain(steps: int, each_s: float, note: str = "") -> list[str]:
    out, clock = io.StringIO(), Clock()
    with Progress(Console(file=out, width=40), "gpt", clock) as progress:
        if note:
            progress.note(note)
        for step in range(1, steps + 1):
            clock.now_s += each_s
            done = StepDone(step=step, steps=steps, loss=10 / step, tokens_per_s=12345.6, sent_bytes=2 * 1024**2)
            progress.step(done)
            if step == steps:
                progress.evaluated(Evaluated(step=step, loss=2.5))
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())
    return out.getvalue().splitlines()


def test_fast_steps_print_every_tenth_part() -> None:
    lines = plain(steps=100, each_s=0.001)
    assert [line.split(",")[0] for line in lines[:-1]] == [
        "step 1/100",
        *(f"step {n}/100" for n in range(11, 100, 10)),
        "step 100/100",
    ]
    assert lines[-1] == "step 100: held-out loss 2.5000"


def test_slow_steps_print_every_five_seconds() -> None:
    lines = plain(steps=20, each_s=3.0)[:-1]
    # Every second step is due by the clock (6 s), which is also a tenth of the steps.
    assert [line.split("/")[0] for line in lines] == ["step 1", *(f"step {n}" for n in range(3, 21, 2)), "step 20"]
    assert len(plain(steps=1000, each_s=3.0)) == 502


def test_a_line_says_what_matters_and_is_never_wrapped() -> None:
    line = plain(steps=100, each_s=1.0)[1]
    assert line == "step 6/100, loss 1.6667, 12,346 tokens/s, 2 MiB over links, 1.57 min left"


def test_a_note_cannot_steer_the_terminal() -> None:
    note, *_ = plain(1, 1.0, note="peer said \x1b[2J\r[bold]hello[/bold]\nthere")
    assert note == "peer said  [2J [bold]hello[/bold] there"


def test_without_loss_or_tokens() -> None:
    out = io.StringIO()
    with Progress(Console(file=out), "gpt", Clock()) as progress:
        progress.step(StepDone(step=1, steps=1, samples_per_s=3.25))
    assert out.getvalue() == "step 1/1, 3.25 samples/s\n"


def live(devices: int) -> str:
    out = io.StringIO()
    names = [f"device-{i}" for i in range(devices)]
    busy = dict.fromkeys(names, 0.5)
    links = {(a, b): 1024**2 * (i + 1) for i, (a, b) in enumerate(pairwise(names))}
    with Progress(Console(file=out, width=140, force_terminal=True, force_interactive=True), "gpt") as progress:
        progress.note("starting")
        progress.step(StepDone(step=1, steps=4, loss=3.0, tokens_per_s=100.0, busy=busy, link_bytes=links))
        progress.evaluated(Evaluated(step=1, loss=2.75))
        progress.step(StepDone(step=2, steps=4, loss=2.5, tokens_per_s=100.0, busy=busy, link_bytes=links))
    return out.getvalue()


def test_live_view() -> None:
    text = live(3)
    assert "starting" in text
    for shown in ("step 2/4", "loss 2.5000", "held-out loss 2.7500 (step 1)", "100 tokens/s", "busy: device-0 50%"):
        assert shown in text
    assert "sent per step: device-1 <-> device-2 2 MiB, device-0 <-> device-1 1 MiB" in text
    assert text.count("\x1b[?25h") == 1, "the cursor is shown again"


def test_live_view_of_a_large_fleet_keeps_to_the_busiest_links() -> None:
    text = live(20)
    assert "and 14 more" in text
    assert "and 16 more" in text
    assert "device-18 <-> device-19" in text
    assert "device-0 <-> device-1 " not in text


def test_live_view_leaves_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with Progress(Console(file=io.StringIO(), force_terminal=True, force_interactive=True), "gpt"):
        assert sys.stdout is before
        print('{"data": 1}')
    assert capsys.readouterr().out == '{"data": 1}\n'


def test_the_view_is_closed_when_the_run_fails() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, force_interactive=True)
    with pytest.raises(KeyboardInterrupt), Progress(console, "gpt"):
        raise KeyboardInterrupt
    assert out.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TTY_INTERACTIVE": "0"}])
def test_a_terminal_that_cannot_move_the_cursor_gets_lines(variables: dict[str, str]) -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, _environ=variables), "gpt", Clock()) as progress:
        progress.step(StepDone(step=1, steps=1, loss=1.0))
    assert "\x1b" not in out.getvalue()
