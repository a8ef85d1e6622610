"""A plan in force: which worker has which stage, how long its work takes, and what its state weighs."""

from __future__ import annotations

import itertools

from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.plans import Plan
from isthmus.plans.worker_ids import device_of
from isthmus.protocol.recovery import StateLayout
from isthmus.protocol.views import plan_views
from isthmus.protocol.work import RunSpec, Share, shares
from isthmus.simulator.costs import Costs
from isthmus.simulator.options import SimulationOptions


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
        """Of each worker's weights and optimizer state."""
        self.gradient_bytes = [stage.memory.gradients for stage in stages]
        self.neighbours = {worker: self._neighbours(worker) for worker in self.worker_ids}
        """By worker id, those on other devices to which it has a link."""

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
    """Of each worker. An only replica does all, whatever number of micro-batches it was planned for."""
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
