"""A run's folder: what is in it and how it is read back.

runs/NAME/
  job.json  fleet.json  plan.json  graph.json     what was run
  trace.jsonl  predicted.jsonl                    what happened, and what the simulator said would
  losses.jsonl                                    one line per step and per evaluation
  timeline.png  loss.png  summary.json
  checkpoints/
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.job import Job
from isthmus.plan import Plan, load_plan, save_plan
from isthmus.trace import Trace, read_jsonl, write_jsonl

Decoded = TypeVar("Decoded")


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    """Optimizer steps done."""
    loss: float
    split: str = "train"


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.timeline = path / "timeline.png"
        self.loss_picture = path / "loss.png"
        self.perfetto = path / "trace.perfetto.json"
        self.summary = path / "summary.json"
        self.graph = path / "graph.json"
        self._losses = path / "losses.jsonl"

    @classmethod
    def fresh(cls, parent: Path, name: str) -> RunFolder:
        """A new folder: `name`, or `name-2` and so on when that is taken."""
        number, path = 1, parent / name
        while path.exists():
            number += 1
            path = parent / f"{name}-{number}"
        path.mkdir(parents=True)
        return cls(path)

    @classmethod
    def newest(cls, parent: Path, name: str) -> RunFolder:
        """The last folder that `fresh` made; UserError when there is none."""
        number, found = 1, parent / name
        while (path := parent / f"{name}-{number + 1}").exists():
            number, found = number + 1, path
        return cls.existing(found)

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        if not (path / "job.json").is_file():
            raise UserError(f"run folder {path}: not found, or not a run (no job.json)")
        return cls(path)

    def write_inputs(self, job: Job, fleet: Fleet, plan: Plan) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "job.json").write_bytes(msgspec.json.format(msgspec.json.encode(job), indent=1))
        (self.path / "fleet.json").write_bytes(msgspec.json.format(msgspec.json.encode(fleet), indent=1))
        save_plan(plan, self.path / "plan.json")

    def job(self) -> Job:
        return self._decode("job.json", Job)

    def fleet(self) -> Fleet:
        return self._decode("fleet.json", Fleet)

    def plan(self) -> Plan:
        return load_plan(self.path / "plan.json")

    def _decode(self, name: str, kind: type[Decoded]) -> Decoded:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except FileNotFoundError:
            raise UserError(f"run folder {self.path}: {name} is missing") from None
        except msgspec.MsgspecError as e:
            raise UserError(f"run folder {self.path}: {name}: {e}") from None

    def write_traces(self, predicted: Trace, measured: Trace) -> None:
        write_jsonl(predicted, self.path / "predicted.jsonl")
        write_jsonl(measured, self.path / "trace.jsonl")

    def traces(self) -> tuple[Trace, Trace]:
        """(predicted, measured)"""
        return read_jsonl(self.path / "predicted.jsonl"), read_jsonl(self.path / "trace.jsonl")

    def log(self, point: LossPoint) -> None:
        with self._losses.open("ab") as file:
            file.write(msgspec.json.encode(point) + b"\n")

    def losses(self) -> list[LossPoint]:
        if not self._losses.is_file():
            return []
        return [msgspec.json.decode(line, type=LossPoint) for line in self._losses.read_bytes().splitlines()]

    def rewind(self, step: int) -> None:
        """Forget losses after `step`: a resumed run makes them again."""
        self._write_losses(p for p in self.losses() if p.step <= step)

    def _write_losses(self, points: Iterable[LossPoint]) -> None:
        kept = list(points)
        self._losses.write_bytes(b"".join(msgspec.json.encode(p) + b"\n" for p in kept))
