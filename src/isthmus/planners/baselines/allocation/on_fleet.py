"""Layer allocation as planners: the blocks between legal cuts are the layers, the fleet's devices the devices.

The workload of a stage is the longer of its compute for one micro-batch and of the bytes it surely receives (or sends
back) at its first block, over the device's best link. Latency is no part of it, because micro-batches in flight hide it
(docs/decisions/0004). The workload never exceeds the period of `cost.kernel`, so a bound on it is one on the period.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import numpy as np

from isthmus.cost import Problem, build_plan
from isthmus.cost.blocks import Blocks, alternatives, coarse
from isthmus.cost.cut_table import RunTable, run_table, stage_bytes
from isthmus.cost.kernel import Ints
from isthmus.cost.network import FleetNetwork, network_of
from isthmus.errors import FleetTooSmall
from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, RunTooLarge, Transfers
from isthmus.planners.baselines.allocation.sky import equal_compute_layers, sky_heuristic_layers, sky_optimal_layers
from isthmus.planners.search.greedy_fill import greedy_fill
from isthmus.plans import Certificate, Plan
from isthmus.units import format_size

MOST_BLOCKS = 400  # places to cut that are kept: those that send the fewest bytes

Allocate = Callable[[LayerProblem], Allocation]


def equal_compute(problem: Problem) -> Plan:
    """Devices in fleet order, each with FLOPs in proportion to its speed (FusionLLM's baseline).

    Raises FleetTooSmall where such a stage does not fit its device.
    """
    return _planned(problem, "equal-compute", equal_compute_layers)


def sky_heuristic(problem: Problem) -> Plan:
    """Sky Computing's heuristic: in fleet order, layers move between neighbours towards the mean workload.

    Raises FleetTooSmall where its coarse stage finds no allocation that fits.
    """
    return _planned(problem, "sky-heuristic", sky_heuristic_layers)


def sky_optimal(problem: Problem) -> Plan:
    """Sky Computing's optimal allocation: any order of devices, a mixed-integer programme under a work limit.

    Raises FleetTooSmall where no order of the devices fits, or none was found within it.
    """
    return _planned(problem, "sky-optimal", sky_optimal_layers)


def layers_of(network: FleetNetwork, blocks: Blocks, in_flight: int) -> LayerProblem:
    """The blocks as layers, with the memory of stages that hold `in_flight` micro-batches."""
    table, one = run_table(blocks), np.arange(blocks.count)
    return LayerProblem(
        layer_flops=np.diff(blocks.work),
        layer_memory_bytes=(table.fixed_bytes - table.working_bytes + in_flight * table.each_bytes)[one, one + 1],
        device_s_per_flop=1.0 / network.speed,
        device_memory_bytes=network.memory,
        device_latency_s=np.zeros_like(network.speed),
        transfers=_transfers(network, blocks),
        memory_reach=_memory_reach(table, network, in_flight),
    )


def _transfers(network: FleetNetwork, blocks: Blocks) -> Transfers | None:
    """Only what was made in the block before is sure to come over one link, from the stage before."""
    if len(network.names) == 1:
        return None
    made, _, use = blocks.uses.T
    near, (_, forward, backward, *_) = made == use - 1, blocks.amounts
    there, back = (np.bincount(use[near], bytes_[near], minlength=blocks.count) for bytes_ in (forward, backward))
    byte_s = network.byte_s + np.diag(np.full(len(network.names), np.inf))
    return Transfers(
        boundary_bytes=np.maximum(there, back),
        device_s_per_byte=np.minimum(byte_s.min(axis=0), byte_s.min(axis=1)),
    )


def _memory_reach(table: RunTable, network: FleetNetwork, in_flight: int) -> Ints:
    """[devices, blocks]: a stage's bytes never fall as it grows, so what fits is a matter of its end."""
    need = np.where(np.isinf(table.work), -1.0, table.fixed_bytes + in_flight * table.each_bytes)[:-1]
    return np.column_stack([np.searchsorted(row, network.memory, side="right") for row in need]) - 1


def _planned(problem: Problem, planner: str, allocate: Allocate) -> Plan:
    network, blocks = network_of(problem), coarse(Blocks(problem), MOST_BLOCKS)
    blocks, in_flight, found = _allocated(problem, network, blocks, planner, allocate)
    order = [network.names[d] for d in found.order]
    made = build_plan(
        problem,
        order,
        blocks.boundaries(np.cumsum(found.counts)[:-1].tolist()),
        planner=planner,
        notes=dict.fromkeys(set(network.names) - set(order), f"{planner} gave it no layers"),
    )
    if found.lower_bound_s <= 0 or any(stage.recompute != blocks.recompute for stage in made.stages):
        return made  # the bound is of stages that all recompute, or none
    question = (
        f"the largest compute or first receipt of a stage per micro-batch, of any order and subset of the "
        f"devices, cuts at {blocks.count - 1} places, memory for {in_flight} micro-batches in flight"
        + (", every stage recomputing" if blocks.recompute else "")
    )
    certificate = Certificate(lower_bound=found.lower_bound_s, gap=found.gap, objective="stage", question=question)
    return msgspec.structs.replace(made, certificate=certificate)


def _allocated(
    problem: Problem, network: FleetNetwork, blocks: Blocks, planner: str, allocate: Allocate
) -> tuple[Blocks, int, Allocation]:
    """With as many micro-batches in flight as the schedule may want, else with as few as it can run on."""
    most = min(problem.micro_batches, len(network.names))
    holds = [problem.micro_batches] if problem.schedule == "gpipe" else list(dict.fromkeys((most, 1)))
    why = ""
    for in_flight, cut in itertools.product(holds, alternatives(blocks)):
        try:
            return cut, in_flight, allocate(layers_of(network, cut, in_flight))
        except FleetTooSmall as refusal:
            why = _binding(problem, network, cut, in_flight, refusal)
    greedy_fill(problem, network, Blocks(problem))  # raises with the device that is short, unless a placement fits
    raise FleetTooSmall(
        f"{planner} found no allocation of model {problem.flow.graph.name!r} that fits fleet {problem.fleet.name!r}, "
        f"although there is one: choose another planner; {why}"
    )


def _binding(problem: Problem, network: FleetNetwork, blocks: Blocks, in_flight: int, refusal: FleetTooSmall) -> str:
    """Return the memory that was short, in bytes: a device's, or that of all together."""
    held, after = f"with {in_flight} micro-batches in flight", problem.constraints.after_headroom
    if isinstance(refusal, RunTooLarge):
        who, room = f"device {network.names[refusal.device]}", int(network.memory[refusal.device])
        need = int(stage_bytes(blocks, refusal.start, [refusal.end], in_flight)[0])
        words = f"to hold operators {blocks.places[refusal.start]}..{blocks.places[refusal.end] - 1} {held}"
        sizes = f"{format_size(need)}, offers {format_size(room)}{after}: {format_size(need - room)} short"
        return f"{words}, {who} needs {sizes}"
    need, room = int(stage_bytes(blocks, 0, [blocks.count], in_flight)[0]), int(network.memory.sum())
    return f"{refusal}; {held} the whole model needs {format_size(need)}, the fleet offers {format_size(room)}{after}"
