"""What is run: models, links and cuts, in full for a GPU and small for trying the benchmark itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import OptimizerConfig
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import cuts
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig
from isthmus.models import ModelSpec
from isthmus.plans import Plan

FAR = Link(0.050, 200e6 / 8)
"""200 Mbit/s and 50 ms."""
NEAR = Link(0.005, 1e9 / 8)
"""Of the recovery: a stage's state of several GB has to cross a link."""
UNSTRETCHED = 1e18
"""FLOP/s of emulated devices that no device reaches: links are shaped, computing takes as long as it takes."""
Shares = tuple[int, ...]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size: Literal["full", "small"]
    model: dict[str, int]
    stages: int
    micro_batches: int = 16
    micro_batch_size: int = 1
    steps: int = 12
    schedule: Literal["1f1b", "zero-bubble"] = "1f1b"

    @property
    def key(self) -> str:
        return f"{self.name}, {self.stages} devices{', split backward' if self.schedule == 'zero-bubble' else ''}"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.micro_batches * self.micro_batch_size * self.model["sequence_length"]

    @property
    def warmups(self) -> tuple[Shares, Shares]:
        """Cuts of the runs that tell of the devices' speeds: others than the one that is predicted."""
        return (2,) + (3,) * (self.stages - 1), (3,) * (self.stages - 1) + (2,)

    def job(self, device: str, *, steps: int = 0, snapshot_every: int = 0) -> Job:
        length = self.model["sequence_length"]
        options: dict[str, object] = {"files": "stdlib", "sequence_length": length, "max_bytes": 4_000_000}
        return Job(
            name="gpu",
            schedule=self.schedule,
            model=ModelSpec(name="gpt", options=dict(self.model)),
            data=DataSpec(kind="text", options=options),
            training=TrainingConfig(
                steps=steps or self.steps,
                batch_size=self.micro_batches * self.micro_batch_size,
                micro_batches=self.micro_batches,
                precision="bf16",
            ),
            optimizer=(OptimizerConfig(name="adamw", lr=1e-4),),
            runtime=RuntimeConfig(
                device=device,
                adapt=False,
                snapshots=snapshot_every > 0,
                snapshot_every=snapshot_every,
                timeout="300 s",
            ),
        )


def fleet_of(devices: int, link: Link, flops_per_s: float = UNSTRETCHED) -> Fleet:
    made = tuple(
        Device(name=f"gpu-{k}", region="here", flops_per_s=flops_per_s, memory_bytes=1 << 40) for k in range(devices)
    )
    return Fleet(name=f"{devices} processes", devices=made, links=Links(default=link))


def plan_of(prepared: Prepared, fleet: Fleet, shares: Shares) -> Plan:
    """A stage per share of the FLOPs, cut where one tensor crosses."""
    problem = prepared.problem(fleet)
    legal = [cut.position for cut in cuts(prepared.flow) if len(cut.values) == 1]
    total, done, boundaries = problem.cumulative_flops[-1], 0, list[int]()
    for share in shares[:-1]:
        done += share
        later = [p for p in legal if not boundaries or p > boundaries[-1]]
        boundaries.append(min(later, key=lambda p: abs(problem.cumulative_flops[p] - total * done / sum(shares))))
    return build_plan(problem, fleet.names[: len(shares)], boundaries, planner="shares of FLOPs")


_GPT2 = {"vocab_size": 50257, "sequence_length": 1024, "width": 768, "layers": 12, "heads": 12}
_BILLION = {"vocab_size": 50257, "sequence_length": 1024, "width": 2048, "layers": 18, "heads": 16}
_SMALL = {"vocab_size": 256, "sequence_length": 64, "width": 64, "layers": 6, "heads": 4}

FULL = (
    *(
        Case(name=name, size="full", model=model, stages=stages)
        for name, model in (("GPT-2 124 M", _GPT2), ("GPT 1 B", _BILLION))
        for stages in (2, 3, 4)
    ),
    Case(name="GPT-2 124 M", size="full", model=_GPT2, stages=3, schedule="zero-bubble"),
)
_TINY = Case(name="GPT 0.3 M", size="small", model=_SMALL, stages=3, micro_batches=8, steps=4)
SMALL = (
    msgspec.structs.replace(_TINY, stages=2),
    _TINY,
    msgspec.structs.replace(_TINY, schedule="zero-bubble"),
)


def lost_case(cases: Sequence[Case]) -> Case:
    """Of the recovery: the largest model over three processes."""
    return next(case for case in reversed(cases) if case.stages == 3 and case.schedule == "1f1b")
