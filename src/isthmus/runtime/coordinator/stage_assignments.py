"""A plan on its devices: what each is assigned, which weights it needs, what it may say of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from isthmus.cost import build_again, layouts_of, with_sync
from isthmus.cost.problem import FLOAT32_BYTES
from isthmus.cost.stage_costs import value_spec
from isthmus.errors import PeerError, UserError
from isthmus.fleet import Fleet, Link, changed
from isthmus.graph import Affine
from isthmus.job import Prepared, constraints_of
from isthmus.planners import whole_replicas
from isthmus.plans import Edge, Packing, Plan, Stage
from isthmus.plans.plan import device_of
from isthmus.protocol import StateLayout
from isthmus.protocol.recovery import state_donors
from isthmus.protocol.run_messages import Share, shares
from isthmus.protocol.run_ports import EpochStart
from isthmus.runtime.coordinator.activation_privacy import protection
from isthmus.runtime.coordinator.run_callbacks import Address
from isthmus.runtime.coordinator.stages import StagePair, stage_pairs
from isthmus.runtime.messages.assignment import (
    Assignment,
    ComputeEmulation,
    GroupShare,
    Neighbour,
    Peer,
    SnapshotReplication,
)
from isthmus.runtime.transport.multi_stream import streams_for
from isthmus.training.checkpoint import OPTIMIZER
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import TensorHeader
from isthmus.training.scaling import LOSS_SCALE, LOSS_SCALE_SHAPE
from isthmus.training.snapshot import check_state

SPARE_WINDOW_BYTES = 1 << 20
STRETCH_S = 0.01  # a stretch of a snapshot lasts about this long on its link
LEAST_STRETCH_BYTES, MOST_STRETCH_BYTES = 1 << 14, 1 << 20
SPARE_SHARE = 0.5  # the share of the time that a link has nothing else to do that snapshots may take
LEAST_SPARE = 0.05  # the share of a link that is never idle that snapshots get all the same
LEAST_INTERVAL_S = 10.0  # between snapshots: a copy in memory is not free either


class StageAssignments:
    """Made anew for each plan. UserError for a plan that cannot be run."""

    def __init__(
        self,
        prepared: Prepared,
        plan: Plan,
        fleet: Fleet,
        *,
        emulated: Fleet | None = None,
        number: int = 0,
        repeats: bool = True,
    ) -> None:
        """`fleet` is what is believed of the devices, `emulated` what they play; `number` tells plans apart; `repeats`:
        gradients alone change the weights."""
        check_feedback(prepared, plan, fleet)
        self.plan = plan
        self.job = prepared.job
        self._prepared = prepared
        self._eval_rest = prepared.eval_rest
        self.fleet = fleet
        self._emulated = emulated
        training = self.job.training
        self.stages = stage_pairs(
            plan,
            prepared.captured,
            clips=training.clip_norm > 0,
            skips=training.leaves_out,
            scales=training.loss_scaling is not None,
        )
        self.by_worker_id = dict(zip(plan.worker_ids, self.stages, strict=True))
        self.protection = protection(prepared, plan, self.stages, constraints_of(self.job, fleet).data_holders)
        counts = [replica.micro_batches for replica in plan.replicas]
        each = zip(shares(counts, self.job.micro_batch_size), plan.replicas, strict=True)
        self._shares = [share for share, replica in each for _ in replica.workers]
        self._shapes = {
            op.target: op.outputs[0].shape_at(self.job.micro_batch_size)
            for pair in self.stages
            for op in pair.train.variables()
        } | {LOSS_SCALE: LOSS_SCALE_SHAPE}
        self._snapshot_copies = self._chosen_copy_holders()
        self.layout = StateLayout(
            parts={worker_id: pair.written for worker_id, pair in self.by_worker_id.items()},
            sizes={name: self._bytes_of([name]) for pair in self.stages for name in pair.written},
            snapshot_copies=self._snapshot_copies,
            keep_every=self._keep_every(),
            period=plan.sync.period,
            number=number,
            repeats=repeats and plan.sync.averages == "gradients" and self.job.schedule != "delayed",
        )

    @property
    def written(self) -> frozenset[str]:
        """Names of all that training changes."""
        return self.layout.all_parts

    @property
    def owned(self) -> frozenset[str]:
        """The names among `written` that optimizers update."""
        return frozenset(name for pair in self.stages for name in pair.owned)

    def repriced(self, fleet: Fleet) -> Plan:
        """This very plan on a fleet with other figures."""
        problem = self._prepared.problem(fleet).cut_into(self.plan.micro_batches)
        alike = build_again(problem, layouts_of(self.plan), self.plan)
        return with_sync(problem, alike, self.plan.sync)

    def of_whole_replicas(self, fleet: Fleet) -> Plan | None:
        """Return the plan of the replicas that lost no device: they go on at once, and a better plan is made meanwhile.
        None for a single replica, if no device was lost, if no replica is whole, or if one has no room for more."""
        if len(self.plan.replicas) == 1 or set(self.plan.devices) <= set(fleet.names):
            return None
        problem = self._prepared.problem(fleet).under(self.plan.replicas[0].schedule)
        return whole_replicas(problem.cut_into(self.plan.micro_batches), self.plan, fleet.names)

    # Snapshots

    def _chosen_copy_holders(self) -> dict[str, str]:
        """Per worker who keeps a copy of its snapshots: the neighbour on another device with the best link to it. None
        where other replicas or copies hold the same: all steps long, or at the end of each period, but for what
        optimizers remember."""
        if len(self.plan.replicas) > 1 or not self.job.runtime.snapshots:
            return {}
        worker_ids, found = self.plan.worker_ids, dict[str, str]()
        for worker_id, pair in self.by_worker_id.items():
            others = (worker_ids[stage] for stage in sorted(self._others(pair)))
            near = [other for other in others if device_of(other) != device_of(worker_id)]
            if near and pair.written and not pair.view.groups:
                found[worker_id] = max(near, key=lambda other: self._bandwidth(worker_id, other))
        return found

    def _bandwidth(self, worker_id: str, other: str) -> float:
        """Bytes/s from one to another, on two devices."""
        return self.fleet.link(device_of(worker_id), device_of(other)).bandwidth_bytes_per_s

    def _keep_every(self) -> int:
        """Steps between snapshots: as the job says, or as the links have room for. 0 where none would help: a device
        alone has nobody to keep a copy."""
        runtime = self.job.runtime
        if not runtime.snapshots or len(self.by_worker_id) == 1:
            return 0
        period = self.plan.sync.period
        every = runtime.snapshot_every or self._affordable()
        return -(-every // period) * period

    def _affordable(self) -> int:
        """A snapshot is sent before the next one is made, in what the plan leaves of its link."""
        step_s = self.plan.predicted.expected_s
        steps = [LEAST_INTERVAL_S / step_s] if step_s > 0 else [1.0]
        for device, snapshot_copy in self._snapshot_copies.items():
            bandwidth = self._bandwidth(device, snapshot_copy)
            stages = self.by_worker_id[device].view.stage, self.by_worker_id[snapshot_copy].view.stage
            busy_s = self._crossing_bytes(*stages) / 2 / bandwidth
            spare = max(LEAST_SPARE, 1.0 - busy_s / step_s) if step_s > 0 else 1.0
            steps.append(self.state_bytes(device) / (bandwidth * spare * SPARE_SHARE) / max(step_s, 1e-9))
        return max(1, math.ceil(max(steps)))

    def state_bytes(self, device: str) -> int:
        """Return the approximate bytes of a device's part of a snapshot."""
        return self._bytes_of(self.by_worker_id[device].written)

    def _bytes_of(self, parts: Collection[str]) -> int:
        """Master weights and the optimizer's tensors."""
        state = self._prepared.problem(self.fleet).state
        return self._elements(parts) * (FLOAT32_BYTES + state.optimizer_bytes)

    def _elements(self, parts: Collection[str]) -> int:
        return sum(math.prod(self._shapes[name]) for name in parts)

    def moving_s(self, now: StageAssignments) -> float:
        """An estimate of how long all devices wait until each has the state of its stage, if `now` is in force.

        State goes from device to device, over all links at the same time. A joining device that gets its state while
        the others train delays them by the transfer of one step's gradients. It cannot catch up if that takes longer
        than a step.
        """
        found = [0.0]
        donors = state_donors(self.layout.parts, now.layout.parts, self.layout.sizes, self._seconds_per_byte)
        for worker_id, given in donors.items():
            per_byte = {donor: self._seconds_per_byte(donor, worker_id) for donor in given}
            gradients_s = max(self._elements(parts) * FLOAT32_BYTES * per_byte[d] for d, parts in given.items())
            follows = (
                now.layout.repeats and worker_id not in now.layout.parts and gradients_s < now.plan.predicted.expected_s
            )
            found.append(
                gradients_s if follows else max(self._bytes_of(parts) * per_byte[d] for d, parts in given.items())
            )
        return max(found)

    def _seconds_per_byte(self, donor: str, receiver: str) -> float:
        near = device_of(donor) == device_of(receiver)
        return 0.0 if near else 1 / self._bandwidth(donor, receiver)

    @property
    def whole_s(self) -> float:
        """An estimate of how long the coordinator takes to bring all devices the state of their stages, each over its
        own line. A fleet does not say where its coordinator is: a line is taken to be as fast as the device's fastest
        link."""
        speed = self.fleet.line_bytes_per_s
        parts = self.layout.parts.items()
        return max((self._bytes_of(own) / speed(device_of(name)) for name, own in parts), default=0.0)

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        return {name: self._shapes[name] for name in sorted(parts)}

    # Assignments

    def assignments(
        self, run: str, begun: EpochStart, addresses: Mapping[str, Address], lease_ahead: int = 0
    ) -> Mapping[str, Assignment]:
        graph = self._prepared.captured.train
        placeholders = {op.target: op for op in graph.ops if op.kind == "placeholder"}
        positions = self._norm_positions()
        found: dict[str, Assignment] = {}
        stages = (pair for r in self.plan.replicas for pair in zip(r.workers, r.weight_flops, strict=True))
        for (stage, apart), (worker_id, pair) in zip(stages, self.by_worker_id.items(), strict=True):
            view = pair.view
            found[worker_id] = Assignment(
                run=run,
                epoch=begun.epoch,
                start_step=begun.step,
                first_item=begun.first_item,
                lease_ahead=lease_ahead,
                device=worker_id,
                view=view,
                train=pair.train,
                evaluation=pair.evaluation,
                placeholders={column: op.name for column, op in placeholders.items()},
                column_dtypes={column: op.outputs[0].dtype for column, op in placeholders.items()},
                engine=self._engine(self._shares[view.stage]),
                recompute=stage.recompute,
                released=self.protection.released.get(view.stage),
                frozen=self.protection.freezes(view.stage),
                discloses=not self.protection.trains_raw(view.stage),
                data=(self._prepared.shared or self.job.used_data).at(stage.device),
                shuffle=self.job.training.shuffle,
                replica=self._prepared.replica,
                train_samples=self._prepared.samples.train,
                layout=self._prepared.samples.layout,
                neighbours=self._neighbours(pair, addresses),
                emulation=self._emulation(stage, apart),
                norm_positions={s: positions[s] for s in (view.stage, *view.others)},
                memory_bytes=stage.memory.total,
                threads=self.job.runtime.threads,
                timeout_s=self.job.timeout_s,
                evaluates=self.job.training.eval_every > 0,
                eval_micro_batches=self._prepared.eval_micro_batches,
                eval_rest=self._eval_rest,
                share=self._shares[view.stage],
                groups=self._groups(view.stage),
                outer=self.plan.sync.outer,
                saves=self.saves(pair),
                snapshot_copy=self._snapshot_copy(worker_id),
                snapshot_sources={
                    self.by_worker_id[of].view.stage: self.shapes(self.by_worker_id[of].written)
                    for of, m in self._snapshot_copies.items()
                    if m == worker_id
                },
            )
        return found

    def _phases(self) -> list[tuple[int, Fleet]]:
        """The emulated fleet from each step on at which it changes; none where nothing is emulated."""
        if self._emulated is None:
            return []
        changes = self.job.runtime.changes
        return [(step, changed(self._emulated, changes, step)) for step in sorted({0, *(c.step for c in changes)})]

    def _emulation(self, stage: Stage, apart: int) -> ComputeEmulation | None:
        if not (phases := self._phases()):
            return None
        return ComputeEmulation(
            flops_per_s=tuple((step, fleet.device(stage.device).sustained_flops_per_s) for step, fleet in phases),
            flops_forward=stage.flops_forward,
            flops_backward=stage.flops_backward,
            flops_weights=apart,
        )

    def _shaped(self, source: str, target: str) -> tuple[tuple[int, Link], ...]:
        """The emulated link from one device to another; none inside a device."""
        if source == target:
            return ()
        return tuple((step, fleet.link(source, target)) for step, fleet in self._phases())

    def _snapshot_copy(self, device: str) -> SnapshotReplication | None:
        if device not in self._snapshot_copies or not self.layout.keep_every:
            return None
        snapshot_copy = self._snapshot_copies[device]
        stretch = int(self._bandwidth(device, snapshot_copy) * STRETCH_S)
        return SnapshotReplication(
            stage=self.by_worker_id[snapshot_copy].view.stage,
            every=self.layout.keep_every,
            stretch_bytes=min(MOST_STRETCH_BYTES, max(LEAST_STRETCH_BYTES, stretch)),
        )

    def _engine(self, share: Share) -> EngineConfig:
        """Gradients are means over everybody's micro-batches; where parameters are averaged, over the replica's own."""
        config = self.job.engine()
        if self.plan.sync.averages == "gradients":
            return config
        return msgspec.structs.replace(config, micro_batches=share.count)

    def _norm_positions(self) -> list[tuple[int, ...]]:
        """Return for each stage where its trainable parameters stand in the module's own order."""
        graph = self._prepared.captured.train
        order = {op.target: i for i, op in enumerate(graph.ops) if op.kind == "parameter"}
        owned = sorted({name for pair in self.stages for name in pair.owned}, key=lambda name: order[name])
        place = {name: i for i, name in enumerate(owned)}
        return [tuple(place[name] for name in pair.owned) for pair in self.stages]

    def _groups(self, worker: int) -> tuple[GroupShare, ...]:
        return tuple(
            GroupShare(group=number, parameters=group.parameters, elements=group.size_bytes // FLOAT32_BYTES)
            for number, group in enumerate(self.plan.sync.groups)
            if worker in self.plan.members(group)
        )

    def saves(self, pair: StagePair) -> tuple[str, ...] | None:
        """Replicas with equal parameters differ in the buffers that their forwards write, which no copy has."""
        if (pair.view.first == 0 and not pair.copy) or self.plan.sync.averages != "gradients":
            return None
        return tuple(sorted(pair.written - {*pair.owned, LOSS_SCALE}))

    def _others(self, pair: StagePair) -> set[int]:
        """Stages that a stage has a link to."""
        view = pair.view
        wanted = {
            *view.forward_from,
            *view.forward_to,
            *view.eval_from,
            *view.eval_to,
            *view.parameter_users,
            *view.parameter_owners,
            *view.partners,
        }
        if view.agrees or view.counts:
            wanted |= set(view.others)
        return wanted

    def _neighbours(self, pair: StagePair, addresses: Mapping[str, Address]) -> tuple[Neighbour, ...]:
        view, devices, worker_ids = pair.view, self.plan.devices, self.plan.worker_ids
        found: list[Neighbour] = []
        for stage in sorted(self._others(pair)):
            here, there = devices[view.stage], devices[stage]
            address = addresses[worker_ids[stage]]
            shapes = self._shaped(here, there)
            found.append(
                Neighbour(
                    stage=stage,
                    device=worker_ids[stage],
                    host=address.host,
                    port=address.port,
                    id=address.id,
                    shape=shapes[0][1] if shapes else None,
                    later=shapes[1:],
                    sent=self._packing(view.stage, stage),
                    received=self._packing(stage, view.stage),
                    window_bytes=self._window(view.stage, stage),
                    streams=1 if here == there else streams_for(self.fleet.link(here, there)),
                )
            )
        return tuple(found)

    def peer(self, here: str, there: str, address: Address, step: int) -> Peer:
        """Another worker as this one reaches it in a step, whether the plan has them or not."""
        source, target = device_of(here), device_of(there)
        shapes = [shape for since, shape in self._shaped(source, target) if since <= step]
        return Peer(
            device=there,
            host=address.host,
            port=address.port,
            id=address.id,
            shape=shapes[-1] if shapes else None,
            streams=1 if source == target else streams_for(self.fleet.link(target, source)),
        )

    def _packing(self, source: int, target: int) -> Packing | None:
        """Return how the plan packs what one stage sends another: values, or gradients of what came from there."""
        first = 0
        for replica in self.plan.replicas:
            for edge in replica.worker_edges:
                there = (first + edge.source, first + edge.target) == (source, target)
                packed = edge.forward_compression if there else edge.backward_compression
                if packed is not None and {first + edge.source, first + edge.target} == {source, target}:
                    return packed.packing
            first += len(replica.workers)
        return None

    def _window(self, a: int, b: int) -> int:
        """Room for every micro-batch that can be in flight between two stages, both graphs, shared parameters and
        sums."""
        sums = sum(g.size_bytes for g in self.plan.sync.groups if {a, b} <= set(self.plan.members(g)))
        return SPARE_WINDOW_BYTES + self._crossing_bytes(a, b) + 2 * sums

    def _crossing_bytes(self, a: int, b: int) -> int:
        """Return the most bytes that a step and an evaluation bring from one stage to the other and back."""
        size, total = self.job.micro_batch_size, 0
        for graphs in ([p.train for p in self.stages], [p.evaluation for p in self.stages]):
            for graph in graphs:
                crossing = [c.spec.nbytes(size) for c in graph.sends if {c.source, c.target} == {a, b}]
                total += self.job.micro_batches * sum(crossing)
        first = 0
        for replica in self.plan.replicas:
            ends = {a - first, b - first}
            total += 4 * sum(p.size_bytes for p, *between in replica.shared_uses if ends == set(between))
            first += len(replica.workers)
        return total

    # What devices need, and say

    def needs(self, device: str) -> tuple[frozenset[str], tuple[str, ...]]:
        """Names of the variables that a device's stage uses, and what those of optimizer state begin with that it
        owns."""
        pair = self.by_worker_id[device]
        names = frozenset(op.target for op in (*pair.train.variables(), *pair.evaluation.variables()))
        return names | (pair.written & {LOSS_SCALE}), tuple(f"{OPTIMIZER}{name}." for name in pair.owned)

    def replica(self, device: str) -> int:
        firsts = sorted({p.view.first for p in self.stages})
        return firsts.index(self.by_worker_id[device].view.first)

    def check_state(self, device: str, tensors: Sequence[TensorHeader]) -> None:
        """PeerError unless they are the device's part of a checkpoint."""
        saves = self.saves(self.by_worker_id[device])
        check_state(
            {n: self._shapes[n] for n in (self.by_worker_id[device].written if saves is None else saves)}, tensors
        )

    def check_parts(self, tensors: Sequence[TensorHeader]) -> None:
        """PeerError unless they are parts of the model that training changes."""
        for header in tensors:
            part = header.name.removeprefix(OPTIMIZER).rpartition(".")[0]
            name = part if header.name.startswith(OPTIMIZER) else header.name
            shape = self._shapes.get(name) if name in self.written else None
            if shape is None or (header.shape != shape and (header.shape or name == header.name)):
                raise PeerError(f"gave {header.name!r} of shape {list(header.shape)}, which is not a part of the model")


def check_feedback(prepared: Prepared, plan: Plan, fleet: Fleet) -> None:
    """UserError where a plan asks for feedback that would do nothing, or that its devices cannot hold."""
    job, samples, constraints = prepared.job, prepared.samples.train, constraints_of(prepared.job, fleet)
    for replica in plan.replicas:
        for stage, place in enumerate(replica.stages):
            edges = [e for e in replica.edges if e.target == stage and _remembers(e)]
            for edge in edges:
                _check_values(prepared, edge)
            used = job.training.steps * job.training.batch_size
            if edges and used <= samples:
                raise UserError(
                    f"compression.feedback: got true, and {job.training.steps} steps of {job.training.batch_size} see "
                    f"none of the {samples} samples twice, expected more than one pass: what is left out of a sample's "
                    "gradients is added when it comes again"
                )
            kept_bytes = samples * sum(e.backward_bytes for e in edges) // job.micro_batch_size
            needed_bytes = place.memory.total + kept_bytes
            offered_bytes = constraints.offered_bytes(fleet.device(place.device).memory_bytes)
            if edges and needed_bytes > offered_bytes:
                raise UserError(
                    f"compression.feedback: device {place.device!r} keeps {kept_bytes} bytes, the gradients of "
                    f"{samples} samples, and needs {needed_bytes} with its stage, "
                    f"expected at most {offered_bytes}{constraints.after_headroom}"
                )


def _remembers(edge: Edge) -> bool:
    return edge.backward_compression is not None and edge.backward_compression.feedback


def _check_values(prepared: Prepared, edge: Edge) -> None:
    for name in edge.gradients:
        spec = value_spec(prepared.flow, name)
        if not spec.shape or spec.shape[0] != Affine(1):
            raise UserError(
                f"compression.feedback: value {name!r} from stage {edge.source} to {edge.target}: got shape "
                f"{list(spec.shape)}, expected the samples first: what is left out is kept by sample"
            )
