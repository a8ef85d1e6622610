"""The models and batches of FusionLLM's experiments (table 6), and its baseline of equal computation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec
from torch import nn

from isthmus.cost import Problem, build_plan, parameter_state
from isthmus.experiments import Column, capture
from isthmus.fleet import Fleet
from isthmus.graph import Flow
from isthmus.models import ModelSpec, as_eager, build_model
from isthmus.planners import legal_places
from isthmus.plans import Plan


class Case(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: ModelSpec
    columns: Mapping[str, Column]
    micro_batch_size: int
    micro_batches: int

    def flow(self) -> Flow:
        """The train graph; no weight is allocated."""
        with contextlib.ExitStack() as stack:

            def build() -> nn.Module:
                module = build_model(self.model)
                stack.enter_context(as_eager(self.columns))
                return module

            return Flow(capture(build, self.columns, name=self.name, batch=self.micro_batch_size).train)

    def problem(self, flow: Flow, fleet: Fleet) -> Problem:
        return Problem(
            flow=flow,
            fleet=fleet,
            micro_batch_size=self.micro_batch_size,
            micro_batches=self.micro_batches,
            state=parameter_state("sgd"),
        )


def _images(size: int) -> dict[str, Column]:
    return {"pixel_values": Column("float32", (3, size, size)), "labels": Column("int64", ())}


def _resnet(layer: str, depths: list[int], widths: list[int], classes: int) -> ModelSpec:
    options: dict[str, object] = {"layer_type": layer, "depths": depths, "hidden_sizes": widths, "num_labels": classes}
    return ModelSpec(name="hf-resnet", options=options)


CASES = (
    Case(
        name="ResNet-18",
        model=_resnet("basic", [2, 2, 2, 2], [64, 128, 256, 512], 10),
        columns=_images(32),
        micro_batch_size=128,
        micro_batches=5,
    ),
    Case(
        name="ResNet-101",
        model=_resnet("bottleneck", [3, 4, 23, 3], [256, 512, 1024, 2048], 200),
        columns=_images(64),
        micro_batch_size=32,
        micro_batches=5,
    ),
    # Untied: a tied embedding of 322 MB would cross the slowest links once per step, which the paper does not mention.
    Case(
        name="GPT2-XL",
        model=ModelSpec(name="hf-gpt2-xl", options={"tie_word_embeddings": False}),
        columns={name: Column("int64", (1024,)) for name in ("input_ids", "labels")},
        micro_batch_size=3,
        micro_batches=2,
    ),
)


def equal_compute(problem: Problem) -> Plan:
    """The paper's second baseline: the same FLOPs for every device, whatever its speed, in fleet order.

    Raises FleetTooSmall.
    """
    places, total, devices = legal_places(problem), problem.cumulative_flops[-1], len(problem.fleet.names)
    targets = (total * k / devices for k in range(1, devices))
    # One heavy operator may span several shares: the devices that would get nothing are left out at the end.
    chosen = sorted({min(places, key=lambda p: abs(problem.cumulative_flops[p] - target)) for target in targets})
    return build_plan(problem, problem.fleet.names[: len(chosen) + 1], chosen, planner="equal-compute")
