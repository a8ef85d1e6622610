"""How long each piece of work takes, and how large each parcel is, under a plan."""

from __future__ import annotations

from collections import defaultdict

from isthmus.fleet import Fleet
from isthmus.plan.plan import Replica
from isthmus.protocol.events import Parcel, Work
from isthmus.simulator.options import SimulationOptions

COUNT_BYTES = 16
NORMS_BYTES = 64


class Costs:
    """Durations of one replica's stages in seconds, without jitter, and sizes of its parcels in bytes."""

    def __init__(self, replica: Replica, fleet: Fleet, options: SimulationOptions, first_worker: int = 0) -> None:
        """`first_worker`: by how much the replica's stages are counted on in `options.durations`."""
        self._options = options
        self._first_worker = first_worker
        self._seconds = _tasklet_seconds(replica, fleet, options, first_worker)
        self._sizes = _parcel_sizes(replica)
        self._eval_sizes = options.eval_edges

    def tasklet_s(self, stage: int, work: Work) -> float:
        return self._seconds[stage, work] + self._options.overheads.tasklet_s

    def update_s(self, stage: int) -> float:
        return self._options.durations.get((self._first_worker + stage, "update"), self._options.update_s)

    def parcel_bytes(self, parcel: Parcel, source: int, target: int, kind: str = "train") -> int:
        """Bytes of a parcel between two stages, in an item of this kind: what the plan's compression leaves of them."""
        if parcel == "count":
            return COUNT_BYTES
        if parcel == "norms":
            return NORMS_BYTES
        if parcel == "forward" and kind == "eval" and self._eval_sizes is not None:
            return self._eval_sizes[source, target]
        return self._sizes[parcel, source, target]


def _tasklet_seconds(
    replica: Replica, fleet: Fleet, options: SimulationOptions, first_worker: int
) -> dict[tuple[int, Work], float]:
    seconds: dict[tuple[int, Work], float] = {}
    for number, stage in enumerate(replica.stages):
        flops_per_s = fleet.device(stage.device).flops_per_s * options.speed_scale.get(stage.device, 1.0)
        worker = first_worker + number
        forward = options.durations.get((worker, "F"), stage.flops_forward / flops_per_s)
        seconds[number, "F"] = forward
        seconds[number, "B"] = options.durations.get((worker, "B"), stage.flops_backward / flops_per_s)
        seconds[number, "E"] = options.durations.get((worker, "E"), forward)
    return seconds


def _parcel_sizes(replica: Replica) -> dict[tuple[Parcel, int, int], int]:
    """By (parcel, source, target). The parameters that two stages share travel as one parcel."""
    sizes: defaultdict[tuple[Parcel, int, int], int] = defaultdict(int)
    for edge in replica.edges:
        sizes["forward", edge.source, edge.target] += edge.forward_wire_bytes
        sizes["backward", edge.target, edge.source] += edge.backward_wire_bytes
    for parameter in replica.shared:
        for user in parameter.users:
            sizes["shared", parameter.owner, user] += parameter.size_bytes
            sizes["shared_gradient", user, parameter.owner] += parameter.size_bytes
    return dict(sizes)
