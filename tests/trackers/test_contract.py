"""Every tracker against its own library, offline, and trackers that fail."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from isthmus.callbacks import Evaluated, RunEnded, RunFault, RunStarted, StepDone
from isthmus.errors import UserError
from isthmus.report.timeline import draw_loss
from isthmus.trackers import Track, TrackerCallback
from isthmus.trackers.callback import BackgroundTracker
from isthmus.trackers.mlflow import MlflowOptions, MlflowTracker
from isthmus.trackers.prometheus import PrometheusOptions, PrometheusTracker
from isthmus.trackers.tracker import TrackedRun, tracker_builders
from tests.tiers import represented_by
from tests.trackers.readers import LIBRARIES, READERS, Found

STEPS = 5
SETTINGS = {"name": "small", "training": {"steps": STEPS}, "optimizer": [{"lr": 0.1}]}
LOSSES = [0.1 * step + 1 / 3 for step in range(1, STEPS + 1)]


@pytest.fixture(scope="session", autouse=True)
def _trackio_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    """trackio reads it once, when it is imported."""
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))


def started(run: Path, first_step: int = 0) -> RunStarted:
    return RunStarted(run=run, kind="pipeline", steps=STEPS, first_step=first_step, settings=SETTINGS)


def session(callback: TrackerCallback, run: Path, first: int, last: int) -> None:
    """Steps after `first` up to `last`, of which the fourth loses a device."""
    callback.start(started(run, first))
    for step in range(first + 1, last + 1):
        figures = {"loss": LOSSES[step - 1], "step_s": 0.5, "tokens_per_s": 200.0, "learning_rates": (0.1,)}
        callback.step(StepDone(step=step, steps=STEPS, busy={"laptop-0": 0.25}, sent_bytes=1000 * step, **figures))
        if step == 4:
            callback.fault(RunFault(step=step, kind="lost", device="laptop-1", text="killed by SIGKILL"))
    callback.evaluation(Evaluated(step=last, loss=0.75))
    outcome = "done" if last == STEPS else "interrupted"
    callback.end(RunEnded(run=run, outcome=outcome, pictures={"plan": run / "plan.png"}))


def tracked(tmp_path: Path, name: str) -> Found:
    """A run of two sessions."""
    run = tmp_path / "run"
    run.mkdir()
    draw_loss([(1, 1.0), (2, 0.5)], [], run / "plan.png")
    options: dict[str, dict[str, object]] = {"wandb": {"mode": "offline"}} if name == "wandb" else {}
    notes: list[str] = []
    track = Track(to=name, group="rates", options=options)
    session(TrackerCallback(track, notes.append, drain_s=600.0), run, 0, 3)
    session(TrackerCallback(track, notes.append, drain_s=600.0), run, 3, STEPS)
    assert notes == []
    return READERS[name](tmp_path)


@pytest.mark.parametrize("name", represented_by(READERS, *(READERS.keys() - {"mlflow", "wandb"})))
def test_the_real_library_finds_what_the_run_gave(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = LIBRARIES.get(name, name)
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{name} is not installed: pip install '.[{name}]'")
    found = tracked(tmp_path, name)
    assert capsys.readouterr().out == "", "stdout is data"
    every = name != "prometheus"  # which has the newest figures alone
    steps = range(1, STEPS + 1) if every else [STEPS]
    kept = torch.tensor(LOSSES).tolist() if name == "tensorboard" else LOSSES  # which keeps float32
    assert found.figures["loss"] == [(step, kept[step - 1]) for step in steps]
    assert found.figures["sent_bytes"] == [(step, 1000.0 * step) for step in steps]
    assert found.figures["busy/laptop-0"] == [(step, 0.25) for step in steps]
    assert found.figures["heldout_loss"] == [(step, 0.75) for step in ([3, STEPS] if every else [STEPS])]
    assert found.figures["faults"][-1][1] == 1.0
    if name != "prometheus":
        assert found.settings["training.steps"] == str(STEPS) and found.settings["optimizer.0.lr"] == "0.1"
    assert found.group in ("rates", None) and found.outcome == "done"
    assert found.events is None or any("lost laptop-1: killed by SIGKILL" in event for event in found.events)
    assert found.pictures is None or any("plan" in picture for picture in found.pictures)


def test_prometheus_reads_the_page_while_the_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tracker = PrometheusTracker(PrometheusOptions(port=port))
    run = TrackedRun(name="run", project="p", group="", id="0" * 32, resumed=False, folder=tmp_path, settings={})
    tracker.start(run)
    tracker.log(3, {"loss": 0.5})
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    assert 'isthmus_loss{group="",run="run"} 0.5' in text and 'isthmus_running{group="",run="run"} 1.0' in text
    tracker.end("done")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)


def test_prometheus_shows_no_figure_of_a_device_that_is_lost(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus is not installed")
    tracker = PrometheusTracker(PrometheusOptions())
    run = TrackedRun(name="run", project="p", group="", id="0" * 32, resumed=False, folder=tmp_path, settings={})
    tracker.start(run)
    tracker.log(1, {"loss": 2.0, "busy/a": 0.5, "busy/b": 0.75})
    tracker.log(2, {"loss": 1.0})  # says nothing of devices
    tracker.log(3, {"loss": 0.5, "busy/b": 0.25})
    tracker.log(4, {"loss": 0.5, "busy/b": 0.5, "busy/c": 0.5})
    tracker.end("done")
    lines = [line for line in (tmp_path / "metrics.prom").read_text().splitlines() if line.startswith("isthmus_busy{")]
    assert sorted(re.findall(r'of="(\w)"', "".join(lines))) == ["b", "c"]


@pytest.mark.parametrize("module", ["sqlalchemy", "alembic"])
def test_mlflow_says_what_its_local_file_needs(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    run = TrackedRun(name="run", project="p", group="", id="0" * 32, resumed=False, folder=tmp_path, settings={})
    with pytest.raises(UserError, match=rf"mlflow needs {module}: pip install '.\[mlflow\]'"):
        MlflowTracker(MlflowOptions()).start(run)


@pytest.mark.parametrize(
    ("missing", "uri", "said"),
    [
        ((), "", ""),
        (("sqlalchemy", "alembic"), "https://mlflow.example.org", ""),
        (("alembic",), "", r"mlflow stores figures on this machine with alembic, not installed here: pip install"),
        (
            ("sqlalchemy", "alembic"),
            "sqlite:///here.db",
            r'with sqlalchemy, alembic, .* in a checkout of isthmus, or name a server: track.options.mlflow.uri = "https://',
        ),
        (("sqlalchemy",), "postgresql+psycopg2://db/here", "with sqlalchemy, not installed here"),
        (("mlflow",), "https://mlflow.example.org", r"mlflow needs mlflow: pip install '.\[mlflow\]'"),
    ],
)
def test_what_mlflow_needs_is_said_before_the_run(
    missing: tuple[str, ...], uri: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlflow-skinny alone speaks with a server and stores nothing here."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else "there")
    track = Track(to="mlflow", options={"mlflow": {"uri": uri}} if uri else {})
    if not said:
        assert tracker_builders(track).keys() == {"mlflow"}
        return
    with pytest.raises(UserError, match=f"^track.to: .*{said}"):
        tracker_builders(track)


class Failing:
    """Fails where it is told to."""

    calls: list[str]
    at = ""

    def __init__(self) -> None:
        Failing.calls = []
        self._called("built")

    def _called(self, name: str) -> None:
        Failing.calls.append(name)
        if name == Failing.at:
            raise SystemExit("no way")

    def start(self, run: TrackedRun) -> None:
        self._called("start")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._called("log")

    def event(self, step: int, text: str) -> None:
        self._called("event")

    def picture(self, name: str, path: Path) -> None:
        self._called("picture")

    def end(self, outcome: str) -> None:
        self._called("end")


@pytest.mark.parametrize("at", ["built", "start", "picture", "log", "event", "end"])
def test_a_tracker_that_fails_is_named_once_and_called_no_more(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "at", at)
    notes: list[str] = []
    session(TrackerCallback(Track(to=f"{__name__}:Failing"), notes.append), tmp_path, 0, STEPS)
    assert notes == [f"tracker {__name__}:Failing failed, and gets nothing more: SystemExit: no way"]
    assert Failing.calls[-1] == at and Failing.calls.count(at) == 1


def test_a_slow_tracker_loses_figures_and_no_events_and_the_run_says_so(tmp_path: Path) -> None:
    go_on, calls = threading.Event(), list[str]()

    class Slow(Failing):
        def start(self, run: TrackedRun) -> None:
            go_on.wait()

    background = BackgroundTracker("slow", Slow, most_waiting=3)
    run = TrackedRun(name="r", project="p", group="", id="0" * 32, resumed=False, folder=tmp_path, settings={})
    background.put(lambda tracker: tracker.start(run))

    def act(what: str) -> Callable[[object], None]:
        return lambda _: calls.append(what)

    for step in range(10):
        background.put(act(f"step {step}"), figures=True)
    background.put(act("event"))
    background.put(act("last"))
    background.end()
    background.wait(0.0)
    assert background.complaint() == "tracker slow is not done in time: what it has not written is lost"
    go_on.set()
    background.wait(60.0)
    kept = [call for call in calls if call.startswith("step")]
    assert calls[len(kept) :] == ["event", "last"] and 2 <= len(kept) <= 4
    said = f"tracker slow is slower than the run: figures of {10 - len(kept)} steps were left out"
    assert (background.complaint(), background.complaint()) == (said, "")
