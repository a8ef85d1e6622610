"""How long each piece of work takes, and how large each parcel is, under a plan."""

from __future__ import annotations

from collections import defaultdict

from isthmus.cost.sync import messages
from isthmus.fleet import Fleet
from isthmus.plans import Plan
from isthmus.protocol.events import Send, SendParts, Work
from isthmus.protocol.run_messages import Parcel
from isthmus.simulator.options import SimulationOptions

COUNT_BYTES = 16
NORMS_BYTES = 64


class Costs:
    """Durations of a plan's stages in seconds, without jitter, and sizes of what they send in bytes.

    Stages are counted through all replicas, as workers are.
    """

    def __init__(self, plan: Plan, fleet: Fleet, options: SimulationOptions) -> None:
        self._options = options
        self._seconds = _tasklet_seconds(plan, fleet, options)
        self._sizes = _parcel_sizes(plan)
        self._parts = _part_sizes(plan)
        self._eval_sizes = options.eval_edges

    def tasklet_s(self, worker: int, work: Work) -> float:
        return self._seconds[worker, work] + self._options.overheads.tasklet_s

    def update_s(self, worker: int) -> float:
        return self._options.durations.get((worker, "update"), self._options.update_s)

    @property
    def save_s(self) -> float:
        return self._options.save_s

    def parcel_bytes(self, send: Send, source: int, kind: str = "train") -> int:
        """Bytes of a parcel in an item of this kind: what the plan's compression leaves of them."""
        if send.parcel == "count":
            return COUNT_BYTES
        if send.parcel == "norms":
            return NORMS_BYTES
        if send.parcel == "forward" and kind == "eval" and self._eval_sizes is not None:
            return self._eval_sizes[source, send.target]
        return self._sizes[send.parcel, source, send.target]

    def part_bytes(self, send: SendParts, source: int) -> int:
        """Bytes of what a worker sends in a round of a sum."""
        return self._parts[send.group, send.round, source, send.target]


def _tasklet_seconds(plan: Plan, fleet: Fleet, options: SimulationOptions) -> dict[tuple[int, Work], float]:
    seconds: dict[tuple[int, Work], float] = {}
    for worker, stage in enumerate(stage for replica in plan.replicas for stage in replica.workers):
        flops_per_s = fleet.device(stage.device).sustained_flops_per_s
        forward = options.durations.get((worker, "F"), stage.flops_forward / flops_per_s)
        seconds[worker, "F"] = forward
        seconds[worker, "B"] = options.durations.get((worker, "B"), stage.flops_backward / flops_per_s)
        seconds[worker, "E"] = options.durations.get((worker, "E"), forward)
    return seconds


def _parcel_sizes(plan: Plan) -> dict[tuple[Parcel, int, int], int]:
    """By (parcel, source, target). The parameters that two stages share travel as one parcel."""
    sizes: defaultdict[tuple[Parcel, int, int], int] = defaultdict(int)
    first = 0
    for replica in plan.replicas:
        for edge in replica.worker_edges:
            sizes["forward", first + edge.source, first + edge.target] += edge.forward_wire_bytes
            sizes["backward", first + edge.target, first + edge.source] += edge.backward_wire_bytes
        for parameter, owner, user in replica.shared_uses:
            sizes["shared", first + owner, first + user] += parameter.size_bytes
            sizes["shared_gradient", first + user, first + owner] += parameter.size_bytes
        first += len(replica.workers)
    return dict(sizes)


def _part_sizes(plan: Plan) -> dict[tuple[int, int, int, int], int]:
    """By group, round, source and target."""
    found: dict[tuple[int, int, int, int], int] = {}
    for number, group in enumerate(plan.sync.groups):
        workers = dict(zip(group.devices, plan.members(group), strict=True))
        for turn, sent in enumerate(messages(group)):
            found |= {(number, turn, workers[a], workers[b]): size for a, b, size in sent}
    return found
