"""Which boundary and which codecs for this fleet: the plan with the least time to a loss that a budget allows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec
from torch._subclasses.fake_tensor import FakeTensorMode

from isthmus.api.make_plan import fleet_for, make
from isthmus.api.observer import Observer, searched
from isthmus.cost import Problem
from isthmus.cost.compression.messages import sender_of, stage_messages_of
from isthmus.errors import UserError
from isthmus.expected_loss import BOUNDARIES, MEASURED_ON, TOPK, boundary_increase, increase_of
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared, prepare, prepared_again
from isthmus.models import BoundaryOptions, build_model
from isthmus.models.residual_stream import find_stream
from isthmus.plans import CompressionConfig, Plan
from isthmus.report.boundary_table import BoundaryChoice, BoundaryRow, replica_line
from isthmus.runtime.processes.signals import Stop


def plan_boundaries(job: Job, budget: float, observer: Observer, stop: Stop) -> BoundaryChoice:
    """The job planned without a boundary, with each subspace that was measured, and with bottlenecks on the links that
    hold the pipeline up; codecs by `just-enough` within what each leaves of the budget.

    UserError for a budget below 0, and for a job that has no plan without a boundary either.
    """
    if not 0 <= budget < math.inf:
        raise UserError(f"--loss-budget: got {budget:g}, expected a share of at least 0, as 0.02")
    job = msgspec.structs.replace(_bounded(job, None), compression=None)
    fleet = fleet_for(job)

    def rows() -> list[BoundaryRow]:
        prepared = prepare(job)
        problem = prepared.problem(fleet)
        dense = make(prepared.job, problem, proving=None)
        found = [_row(prepared, fleet, "none", None, 0.0, budget)]
        try:
            blocks = _block_ends(job, problem)
        except UserError as refusal:
            return [*found, BoundaryRow(name="subspace, residual", settings="", refused=str(refusal))]
        bounded = _subspaces(), _bottlenecks(problem, dense, blocks)
        return found + [_row(prepared, fleet, *one, budget) for some in bounded for one in some]

    found = searched(observer, stop, rows, best_so_far=True)
    ordered = sorted(found, key=lambda row: row.time_to_loss_s)
    return BoundaryChoice(
        model=job.model.name, fleet=fleet.name, budget=budget, measured_on=MEASURED_ON, rows=tuple(ordered)
    )


def _subspaces() -> Iterator[tuple[str, BoundaryOptions, float]]:
    for rate, increase in BOUNDARIES["subspace"].items():
        yield f"subspace, rate {rate:g}", BoundaryOptions(method="subspace", rate=rate), increase


def _bottlenecks(
    problem: Problem, dense: Plan, blocks: Mapping[str, int]
) -> Iterator[tuple[str, BoundaryOptions, float]]:
    """One behind the block next to each cut whose link takes longer than the slowest device, with the least rate that
    was measured and makes up for it."""
    after: dict[str, float] = {}
    measured = BOUNDARIES["residual"]
    for replica in dense.replicas if measured else ():
        sender = sender_of(problem, replica)
        for message in stage_messages_of(problem, sender):
            needed = message.wire_s(problem, None) / sender.slowest_s
            if needed > 1:
                cut = replica.stages[replica.edges[message.edge].source].last
                block = min(blocks, key=lambda name: abs(blocks[name] - cut))
                rate = min((r for r in measured if r >= needed), default=max(measured))
                after[block] = max(rate, after.get(block, 0.0))
    if after:
        increase = boundary_increase("residual", after.values())
        yield "residual, on slow links", BoundaryOptions(method="residual", after=after), increase


def _block_ends(job: Job, problem: Problem) -> dict[str, int]:
    """The last operator of each block but the last. UserError for a model without a residual stream, and for one whose
    weights are there before it is trained."""
    try:
        _bounded(job, BoundaryOptions(method="subspace"))
    except ValueError as refusal:
        raise UserError(f"model.{refusal}") from None
    with FakeTensorMode():
        blocks = find_stream(build_model(job.model)).blocks
    modules = [op.module for op in problem.flow.operators]
    return {b: max(k for k, m in enumerate(modules) if m == b or m.startswith(f"{b}.")) for b in blocks[:-1]}


def _bounded(job: Job, boundary: BoundaryOptions | None) -> Job:
    return msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, boundary=boundary))


def _row(
    dense: Prepared, fleet: Fleet, name: str, boundary: BoundaryOptions | None, increase: float, budget: float
) -> BoundaryRow:
    if increase > budget:
        refusal = f"{increase:.2%} of the loss is expected, more than the budget"
        return BoundaryRow(name=name, settings="", refused=refusal)
    packed = CompressionConfig(method="just-enough", ratio=max(TOPK), loss_budget=budget - increase)
    settings = f"{_toml(boundary)}{_packing_toml(packed)}"
    job = msgspec.structs.replace(_bounded(dense.job, boundary), compression=packed)
    try:
        plan = make(job, prepared_again(dense, job).problem(fleet), proving=None)
    except UserError as refusal:
        return BoundaryRow(name=name, settings=settings, refused=str(refusal))
    return BoundaryRow(
        name=name,
        settings=settings,
        step_s=plan.predicted.expected_s,
        bottleneck=plan.predicted.bottleneck,
        replicas=tuple(map(replica_line, plan.replicas)),
        increase=increase + increase_of(plan.replicas),
    )


def _toml(boundary: BoundaryOptions | None) -> str:
    if boundary is None:
        return ""
    if boundary.method == "subspace":
        return f'[model.boundary]\nmethod = "subspace"\nrate = {boundary.rate:g}\n'
    after = ", ".join(f'"{block}" = {rate:g}' for block, rate in boundary.rates.items())
    return f'[model.boundary]\nmethod = "residual"\nafter = {{{after}}}\n'


def _packing_toml(packed: CompressionConfig) -> str:
    return (
        f'[compression]\nmethod = "{packed.method}"\nratio = {packed.ratio:g}\nloss_budget = {packed.loss_budget:g}\n'
    )
