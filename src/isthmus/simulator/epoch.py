"""A plan in force: which worker has which stage, how long its work takes, how large its parcels are, and what its state
weighs."""

from __future__ import annotations

import itertools
from collections import defaultdict

from isthmus.cost.sync import messages
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.plans import Plan
from isthmus.plans.plan import device_of
from isthmus.protocol.recovery import StateLayout
from isthmus.protocol.run_messages import Arrived, Parcel, PartsArrived, RunSpec, Share, Work, shares
from isthmus.protocol.views import plan_views
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

    def parcel_bytes(self, body: Arrived, target: int, kind: str = "train") -> int:
        """Bytes of a parcel in an item of this kind: what the plan's compression leaves of them."""
        if body.parcel == "count":
            return COUNT_BYTES
        if body.parcel == "norms":
            return NORMS_BYTES
        if body.parcel == "forward" and kind == "eval" and self._eval_sizes is not None:
            return self._eval_sizes[body.source, target]
        return self._sizes[body.parcel, body.source, target]

    def part_bytes(self, body: PartsArrived, target: int) -> int:
        """Bytes of what a worker sends in a round of a sum."""
        return self._parts[body.group, body.round, body.source, target]


def _tasklet_seconds(plan: Plan, fleet: Fleet, options: SimulationOptions) -> dict[tuple[int, Work], float]:
    seconds: dict[tuple[int, Work], float] = {}
    workers = [pair for r in plan.replicas for pair in zip(r.workers, r.weight_flops, strict=True)]
    for worker, (stage, apart) in enumerate(workers):
        flops_per_s = fleet.device(stage.device).sustained_flops_per_s
        forward = options.durations.get((worker, "F"), stage.flops_forward / flops_per_s)
        seconds[worker, "F"] = forward
        backward = (stage.flops_backward - apart) / flops_per_s
        seconds[worker, "B"] = options.durations.get((worker, "B"), backward)
        seconds[worker, "W"] = options.durations.get((worker, "W"), apart / flops_per_s)
        seconds[worker, "E"] = options.durations.get((worker, "E"), forward)
    return seconds


def _parcel_sizes(plan: Plan) -> dict[tuple[Parcel, int, int], int]:
    """Return the bytes of each (parcel, source, target). The parameters that two stages share travel as one parcel."""
    sizes: defaultdict[tuple[Parcel, int, int], int] = defaultdict(int)
    first = 0
    for replica in plan.replicas:
        for edge in replica.worker_edges:
            sizes["forward", first + edge.source, first + edge.target] += edge.forward_wire_bytes
            sizes["backward", first + edge.target, first + edge.source] += edge.backward_wire_bytes
        for parameter, owner, user in replica.shared_uses:
            sizes["shared", first + owner, first + user] += parameter.size_bytes
            sizes["shared_gradient", first + user, first + owner] += parameter.gradient_bytes
        first += len(replica.workers)
    return dict(sizes)


def _part_sizes(plan: Plan) -> dict[tuple[int, int, int, int], int]:
    """Return the bytes of each message of a group's sum, by group, round, source and target."""
    found: dict[tuple[int, int, int, int], int] = {}
    for number, group in enumerate(plan.sync.groups):
        workers = dict(zip(group.devices, plan.members(group), strict=True))
        for turn, sent in enumerate(messages(group)):
            found |= {(number, turn, workers[a], workers[b]): size for a, b, size in sent}
    return found


class Epoch:
    """Workers are numbered as in `StageView`; worker ids name them for the coordinator."""

    def __init__(
        self, plan: Plan, fleet: Fleet, spec: RunSpec, options: SimulationOptions, layout: StateLayout | None = None
    ) -> None:
        """UserError for a plan that cannot be run."""
        _check_neighbours(plan)
        self.plan = plan
        self.layout = layout or StateLayout(parts={})
        self.worker_ids = plan.worker_ids
        self.number = {worker_id: number for number, worker_id in enumerate(self.worker_ids)}
        self.devices = plan.devices
        self.views = plan_views(plan, clips=options.clips, counts=options.counts, eval_edges=options.eval_edges)
        self.costs = Costs(plan, fleet, options)
        self.shares = _shares(plan, spec)
        stages = [stage for replica in plan.replicas for stage in replica.workers]
        self.state_bytes = [stage.memory.weights + stage.memory.optimizer for stage in stages]
        """Bytes of each worker's weights and optimizer state."""
        ways = [options.recovery.control_s_per_byte.get(stage.device, 0.0) for stage in stages]
        self.copy_s = [size * way for size, way in zip(self.state_bytes, ways, strict=True)]
        """Seconds that a copy of each worker's state takes to the coordinator, or from it."""
        self.savers = len(plan.replicas[0].stages) if plan.sync.averages == "gradients" else len(stages)
        """So many workers, the first ones, give theirs to a checkpoint: equal parameters are saved once."""
        self.neighbours = {worker: self._neighbours(worker) for worker in self.worker_ids}
        """The workers on other devices to which each worker has a link."""

    def part_bytes(self, worker_id: str, part: str) -> int:
        """Bytes of one part of a worker's state: an equal share of it where the layout does not say."""
        share = self.state_bytes[self.number[worker_id]] / max(1, len(self.layout.parts.get(worker_id, ())))
        return self.layout.sizes.get(part, round(share))

    def _neighbours(self, worker_id: str) -> tuple[str, ...]:
        view = self.views[self.number[worker_id]]
        numbers = {*view.forward_from, *view.forward_to, *view.parameter_users, *view.parameter_owners, *view.partners}
        numbers |= set(view.others) if view.agrees or view.counts else set()
        found = {self.worker_ids[number] for number in numbers}
        if copy := self.layout.snapshot_copies.get(worker_id):
            found.add(copy)
        found |= {of for of, holder in self.layout.snapshot_copies.items() if holder == worker_id}
        return tuple(sorted(other for other in found if device_of(other) != device_of(worker_id)))


def _shares(plan: Plan, spec: RunSpec) -> list[Share]:
    """Return each worker's share. A single replica does all, whatever number of micro-batches it was planned for."""
    counts = [r.micro_batches for r in plan.replicas] if len(plan.replicas) > 1 else [spec.micro_batches]
    each = zip(shares(counts, spec.micro_batch_size), plan.replicas, strict=True)
    return [share for share, replica in each for _ in replica.workers]


def _check_neighbours(plan: Plan) -> None:
    """A device may run several stages of one replica, but no two that follow each other."""
    replica_of = [number for number, replica in enumerate(plan.replicas) for _ in replica.workers]
    chain = [stage for replica in plan.replicas for stage in replica.stage_of]
    workers_of: dict[str, list[int]] = {}
    for worker, device in enumerate(plan.devices):
        workers_of.setdefault(device, []).append(worker)
    for device, workers in workers_of.items():
        for a, b in itertools.pairwise(workers):
            if replica_of[a] != replica_of[b] or chain[b] == chain[a] + 1:
                raise UserError(
                    f"plan: stages {a} and {b} are both on device {device!r}, expected stages of one replica that are "
                    "no neighbours"
                )
