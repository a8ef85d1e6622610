"""Folders for the page to show: recorded and made up."""

from __future__ import annotations

import itertools
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from isthmus.api.rounds import round_evaluation, round_step
from isthmus.api.run_entries import ENTRIES
from isthmus.api.watch import RunLog
from isthmus.callbacks import RunStarted
from isthmus.federated.evaluation import RoundHistory
from isthmus.programs.open_phase import RoundRecord
from isthmus.protocol.federated_messages import ClientTime, RefusedUpdate
from isthmus.run_files import JOB, ROUND_LINES
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.runtime.service.job_queue import JobQueue
from isthmus.runtime.service.status_file import CoordinatorStatus, DeviceStatus, LinkStatus, write_status


def recorded_run(folder: Path) -> Path:
    """A real run of six devices (`record.py`): home-1 is killed after step 12, and the run goes on without it."""
    with zipfile.ZipFile(Path(__file__).parent / "recorded.zip") as kept:
        kept.extractall(folder)
    return folder


def add_entry(run: Path, **entry: object) -> None:
    """As a run that works does."""
    with (run / ENTRIES).open("a") as file:
        file.write(json.dumps({"at_s": time.time(), **entry}) + "\n")


def slow_link(run: Path, source: str, target: str) -> None:
    """Its messages took ten times as long."""
    trace = run / "trace.jsonl"
    lines = [json.loads(line) for line in trace.read_bytes().splitlines()]
    for line in lines:
        if line.get("track") == "send" and (line["device"], line["other"]) == (source, target):
            line["end_s"] = line["start_s"] + 10 * (line["end_s"] - line["start_s"])
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))


SHIFTS = (-1.0, 0.2, 1.1)


def figures(values: list[float], worst: Callable[[list[float]], float]) -> dict[str, object]:
    """Of three sites, or of more clients."""
    names = ("north", "east", "south") if len(values) == 3 else map(str, range(len(values)))
    mean, low, high = sum(values) / len(values), min(values), max(values)
    spread = {"clients": len(values), "mean": mean, "worst_decile": worst(values), "deviation": (high - low) / 2.4}
    return {**spread, "each": dict(zip(names, values, strict=True))}


def federated_run(folder: Path, rounds: int = 5, clients: int = 0) -> Path:
    """Of two executors; in round 3 an update is refused, a client is stolen and another one is missing. Figures are of
    three sites, or of so many clients."""
    folder.mkdir(parents=True)
    document = {"name": folder.name, "federated": {"rounds": rounds, "deployment": {"sites": ["north", "south"]}}}
    (folder / JOB).write_text(json.dumps(document))
    privacy = {"epsilon": 2.5, "delta": 1e-5, "rounds": rounds, "sampling_probability": 0.1}
    (folder / "privacy.json").write_text(json.dumps(privacy))
    lines = b""
    for number in range(rounds):
        odd = number == 2
        record = RoundRecord(
            round=number,
            attempt=0,
            trained={
                "executor-0": (ClientTime(1, 40, 0.5), ClientTime(2, 60, 0.7)),
                "executor-1": (ClientTime(3, 90, 1.0 + odd),),
            },
            refused=(RefusedUpdate(4, "not finite"),) if odd else (),
            missing=(5,) if odd else (),
            predicted_s=1.1,
            stolen=int(odd),
            closed_by="quorum" if odd else "all",
        )
        left = 0.5 / (number + 1)
        evaluation = {
            "loss": 4 * left,
            "metrics": {"accuracy": 0.9 - left},
            "clients": {
                "loss": figures([left * (4 + shift) for shift in SHIFTS], max),
                "accuracy": figures(
                    [0.85 - left - shift / 10 for shift in (SHIFTS * max(1, clients))[: clients or 3]], min
                ),
            },
        }
        line = {"record": record, "seconds": 1.5, "sent_bytes": 1000, "received_bytes": 500, "evaluation": evaluation}
        lines += msgspec.json.encode(line) + b"\n"
    (folder / ROUND_LINES).write_bytes(lines)
    now_s = itertools.count(time.time())
    log = RunLog(folder, lambda _: None, lambda: float(next(now_s)))
    log.began(RunStarted(run=folder, kind="federated", steps=rounds))
    for line in RoundHistory.of(folder).lines():
        log.stepped(round_step(line, rounds), ())
        assert line.evaluation is not None
        log.evaluated(round_evaluation(line.record.round + 1, line.evaluation))
    log.ended("done")
    return folder


def served_fleet(state: Path, run: Path) -> Path:
    """Three devices, two links and three jobs: one has run in this folder, one failed, one waits."""
    FleetState(state)
    queue = JobQueue(state)
    with queue.served():
        first = queue.submit("recorded", "pipeline", b'{"training": {"steps": 24}}', state)
        queue.begin()
        queue.runs_in(first, run)
        queue.end(first, "done")
        second = queue.submit("wrong", "pipeline", b"{}", state)
        queue.begin()
        queue.end(second, "failed", "no data")
        queue.submit("later", "pipeline", b"{}", state)
    queue.close()
    devices = tuple(DeviceStatus(name=name, id=name[0] * 32, working=name != "eve") for name in ("ann", "bob", "eve"))
    links = (
        LinkStatus(devices=("ann", "bob"), relayed=False, latency_s=0.05),
        LinkStatus(devices=("bob", "eve"), relayed=True, latency_s=0.2, carried_bytes=1 << 20),
    )
    write_status(state, CoordinatorStatus(at_s=time.time() + 4, port=1, devices=devices, links=links))
    return state
