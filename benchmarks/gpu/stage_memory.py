"""What a stage takes of its accelerator's memory, beside what its plan says: `stage_memory.py < question.json`.

Each stage runs in a process of its own, with as many micro-batches in flight as the plan lets it hold, for two steps.
What counts is the most that torch's allocator has reserved, without what it had before. (On a CPU it is the process's
memory, with all libraries' workspaces: of small models that says little.)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from isthmus.accelerators import Accelerator, open_accelerator
from isthmus.accelerators.copies import to_device
from isthmus.graph import Crossing, Flow, Ref, StageGraph, assign, partition
from isthmus.job import Job, Prepared, keep_prepared, kept_prepared
from isthmus.plan import Plan
from isthmus.training.engine import TorchEngine

STEPS = 2


class Question(msgspec.Struct, frozen=True, kw_only=True):
    job: Job
    prepared: str
    """Where the capture is kept."""
    plan: Plan
    stage: int
    device: str


class StageBytes(msgspec.Struct, frozen=True, kw_only=True):
    stage: int
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def measured_bytes(prepared: Prepared, plan: Plan, device: str) -> tuple[StageBytes, ...]:
    """Of each stage of a plan with one replica. CalledProcessError where a stage's process fails."""
    found: list[StageBytes] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prepared"
        keep_prepared(prepared, path)
        for number, stage in enumerate(plan.stages):
            print(f"  memory of stage {number} ...", file=sys.stderr)
            asked = Question(job=prepared.job, prepared=str(path), plan=plan, stage=number, device=device)
            command = [sys.executable, __file__]
            done = subprocess.run(command, input=msgspec.json.encode(asked), stdout=subprocess.PIPE, check=True)
            found.append(StageBytes(stage=number, predicted=stage.memory.total, measured=int(done.stdout)))
    return tuple(found)


class Stage:
    """One stage with zeros for weights and inputs: memory does not depend on numbers."""

    def __init__(self, question: Question, accelerator: Accelerator) -> None:
        prepared = kept_prepared(question.job, Path(question.prepared))
        assert prepared is not None, "it was kept a moment ago"
        flow = Flow(prepared.captured.train)
        self._graph = partition(flow, assign(flow, question.plan.boundaries()))[question.stage]
        self._batch = question.job.micro_batch_size
        self._accelerator = accelerator
        self._columns = {op.target: op for op in prepared.captured.train.ops if op.kind == "placeholder"}
        self._count = question.job.training.micro_batches
        self._in_flight = min(question.plan.replica.schedule.in_flight[question.stage], self._count)
        nothing = StageGraph(
            index=self._graph.index, ops=(), columns=(), receives=(), sends=(), borrows={}, lends={}
        )  # fmt: skip
        weights = {
            op.target: torch.zeros(op.outputs[0].shape_at(1), dtype=_dtype(op.outputs[0].dtype))
            for op in self._graph.variables()
        }
        self._engine = TorchEngine(
            self._graph, nothing, question.job.engine(), weights, accelerator=accelerator,
            recompute=question.plan.stages[question.stage].recompute,
        )  # fmt: skip

    def step(self, number: int) -> None:
        """1F1B with its limit of micro-batches in flight."""
        for micro_batch in range(self._count + self._in_flight - 1):
            if micro_batch < self._count:
                self._engine.forward(number, micro_batch, self._inputs())
            if (due := micro_batch - self._in_flight + 1) >= 0:
                self._engine.backward(due, self._gradients())
        self._engine.collect(None)
        self._engine.take_loss()
        self._engine.update(number, None)

    def _inputs(self) -> dict[Ref, Tensor]:
        specs = {Ref(self._columns[name].name): self._columns[name].outputs[0] for name in self._graph.columns}
        specs |= {c.value: c.spec for c in self._graph.receives}
        return {ref: self._zeros(spec.shape_at(self._batch), spec.dtype) for ref, spec in specs.items()}

    def _gradients(self) -> list[dict[Ref, Tensor]]:
        """By the stages that they come from."""
        found: dict[int, dict[Ref, Tensor]] = {}
        for c in _with_gradients(self._graph.sends):
            found.setdefault(c.target, {})[c.value] = self._zeros(c.spec.shape_at(self._batch), c.spec.dtype)
        return list(found.values())

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return to_device(self._accelerator, torch.zeros(shape, dtype=_dtype(dtype)))


def _with_gradients(crossings: Iterable[Crossing]) -> list[Crossing]:
    return [c for c in crossings if c.gradient]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def main() -> None:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    torch.set_num_threads(1)
    accelerator = open_accelerator(question.device)
    before = accelerator.memory().reserved
    accelerator.reset_peak()
    stage = Stage(question, accelerator)
    for number in range(STEPS):
        stage.step(number)
    accelerator.synchronize()
    print(accelerator.memory().peak_reserved - before)


if __name__ == "__main__":
    main()
