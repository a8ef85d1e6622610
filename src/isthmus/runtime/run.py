"""One training run: its devices, the conductor, checkpoints, and what is left behind."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

import msgspec
from torch import Tensor

from isthmus.cost.problem import FLOAT32_BYTES
from isthmus.errors import PeerError, UserError
from isthmus.fleet import Fleet
from isthmus.job import Prepared
from isthmus.plan import Packing, Plan
from isthmus.protocol import Coordinator, Item, RunSpec
from isthmus.protocol.work import Share, shares
from isthmus.runtime.assignment import Assignment, Emulation, GroupShare, Neighbour
from isthmus.runtime.conductor import Address, Conductor, Outcome
from isthmus.runtime.crew import Call, Crew, LocalCrew
from isthmus.runtime.stages import StagePair, refuse_shared_devices, stage_pairs
from isthmus.trace import Span
from isthmus.training.checkpoint import OPTIMIZER, CheckpointWriter, Manifest, read_manifest, replica_prefix
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import TensorHeader
from isthmus.training.weights import initial_weights, rest, resume

SPARE_WINDOW_BYTES = 1 << 20


class Watcher(msgspec.Struct, frozen=True, kw_only=True):
    """Who wants to know of a run's progress."""

    accepted: Callable[[], None] = lambda: None
    """Everything was checked, the checkpoint to go on from too, and nothing was written yet."""
    advanced: Callable[[Item, float | None, tuple[Span, ...]], None] = lambda item, loss, spans: None
    saved: Callable[[int, Path], None] = lambda step, directory: None


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a run runs."""

    emulate: bool = True
    resume_from: Path | None = None
    """A checkpoint to go on from."""
    crew: Crew = LocalCrew()
    """Who computes."""


def run_spec(prepared: Prepared, start_step: int = 0) -> RunSpec:
    job, t = prepared.job, prepared.job.training
    samples = min(t.eval_samples, prepared.heldout_samples)
    count = samples // job.micro_batch_size
    if t.eval_every and not count:
        raise UserError(
            f"training.eval_samples: {samples} held-out samples are fewer than a micro-batch ({job.micro_batch_size})"
        )
    return RunSpec(
        steps=t.steps, micro_batches=t.micro_batches, micro_batch_size=job.micro_batch_size, eval_every=t.eval_every,
        eval_micro_batches=count, save_every=t.save_every, lease_ahead=job.runtime.lease_ahead, start_step=start_step,
    )  # fmt: skip


class TrainingScript:
    """The run's side of the conductor: what each device gets, and what becomes of what it returns."""

    def __init__(
        self, prepared: Prepared, plan: Plan, fleet: Fleet, folder: Path, options: RunOptions, watcher: Watcher
    ) -> None:
        self.job = prepared.job
        self.run = secrets.token_hex(16)
        self.start_step = 0
        self._prepared = prepared
        self._plan = plan
        self._fleet = fleet
        self._options = options
        self._watcher = watcher
        self._writer = CheckpointWriter(folder / "checkpoints", keep=self.job.training.keep_checkpoints)
        self.stages = stage_pairs(plan, prepared.captured, clips=self.job.training.clip_norm > 0)
        self._by_device = dict(zip(plan.devices, self.stages, strict=True))
        counts = [replica.micro_batches for replica in plan.replicas]
        each = zip(shares(counts, self.job.micro_batch_size), plan.replicas, strict=True)
        self._shares = [share for share, replica in each for _ in replica.stages]
        self._weights = initial_weights(prepared.build, prepared.captured, self.job.training.seed)
        self._others: dict[int, dict[str, Tensor]] = {}
        """Of replicas but the first, what a checkpoint holds of theirs alone."""
        written = {name for pair in self.stages for name in pair.written}
        own = {n for n in self._weights if n not in prepared.captured.constants}
        self._rest = rest(self._weights, written, own)
        if options.resume_from is not None:
            self.start_step = self._resume(options.resume_from, written | self._rest.keys())

    def _resume(self, checkpoint: Path, expected: Set[str]) -> int:
        job, manifest = self.job, read_manifest(checkpoint)
        for field, got, saved in (
            ("training.seed", job.training.seed, manifest.seed),
            ("training.batch_size", job.training.batch_size, manifest.batch),
            ("training.shuffle", job.training.shuffle, manifest.shuffle),
            ("data", self._prepared.fingerprints.get("train"), manifest.data.get("train")),
        ):
            if got != saved:
                raise UserError(f"resume: {field}: got {got}, the checkpoint {checkpoint.name} was made with {saved}")
        self._weights, self._others = resume(self._weights, expected, job.optimizer, checkpoint)
        return manifest.step

    def assignments(self, addresses: Mapping[str, Address]) -> Mapping[str, Assignment]:
        graph = self._prepared.captured.train
        placeholders = {op.target: op for op in graph.ops if op.kind == "placeholder"}
        positions = self._norm_positions()
        found: dict[str, Assignment] = {}
        stages = (stage for replica in self._plan.replicas for stage in replica.stages)
        for stage, pair in zip(stages, self.stages, strict=True):
            view, device = pair.view, self._fleet.device(stage.device)
            emulation = Emulation(
                flops_per_s=device.flops_per_s, flops_forward=stage.flops_forward, flops_backward=stage.flops_backward
            )
            found[stage.device] = Assignment(
                run=self.run, device=stage.device, view=view, train=pair.train, evaluation=pair.evaluation,
                placeholders={column: op.name for column, op in placeholders.items()},
                column_dtypes={column: op.outputs[0].dtype for column, op in placeholders.items()},
                engine=self._engine(self._shares[view.stage]), recompute=stage.recompute,
                data=self.job.data, shuffle=self.job.training.shuffle, fingerprints=self._prepared.fingerprints,
                neighbours=self._neighbours(pair, addresses),
                emulation=emulation if self._options.emulate else None,
                norm_positions={s: positions[s] for s in (view.stage, *view.others)},
                threads=self.job.runtime.threads, patience_s=self.job.patience_s,
                evaluates=self.job.training.eval_every > 0, share=self._shares[view.stage],
                groups=self._groups(stage.device), saves=self._saves(pair),
            )  # fmt: skip
        return found

    def _engine(self, share: Share) -> EngineConfig:
        """Gradients are means over everybody's micro-batches; where parameters are averaged, over the replica's own."""
        config = self.job.engine()
        if self._plan.sync.averages == "gradients":
            return config
        return msgspec.structs.replace(config, micro_batches=share.count)

    def _norm_positions(self) -> list[tuple[int, ...]]:
        """Of each stage, where its trainable parameters stand in the module's own order."""
        graph = self._prepared.captured.train
        order = {op.target: i for i, op in enumerate(graph.ops) if op.kind == "parameter"}
        owned = sorted({name for pair in self.stages for name in pair.owned}, key=lambda name: order[name])
        place = {name: i for i, name in enumerate(owned)}
        return [tuple(place[name] for name in pair.owned) for pair in self.stages]

    def _groups(self, device: str) -> tuple[GroupShare, ...]:
        return tuple(
            GroupShare(group=number, parameters=group.parameters, elements=group.size_bytes // FLOAT32_BYTES)
            for number, group in enumerate(self._plan.sync.groups)
            if device in group.devices
        )

    def _saves(self, pair: StagePair) -> tuple[str, ...] | None:
        """Replicas with equal parameters differ in the buffers that their forwards write."""
        if pair.view.first == 0 or self._plan.sync.averages == "parameters":
            return None
        return tuple(sorted(pair.written - set(pair.owned)))

    def _neighbours(self, pair: StagePair, addresses: Mapping[str, Address]) -> tuple[Neighbour, ...]:
        view, devices = pair.view, self._plan.devices
        wanted = {
            *view.forward_from, *view.forward_to, *view.eval_from, *view.eval_to, *view.lends_to, *view.borrows_from,
            *view.partners,
        }  # fmt: skip
        if view.clips or view.counts:
            wanted |= set(view.others)
        found: list[Neighbour] = []
        for stage in sorted(wanted):
            device = devices[stage]
            address = addresses[device]
            shape = self._fleet.link(devices[view.stage], device) if self._options.emulate else None
            found.append(Neighbour(
                stage=stage, device=device, host=address.host, port=address.port, id=address.id, shape=shape,
                sent=self._packing(view.stage, stage), received=self._packing(stage, view.stage),
                window_bytes=self._window(view.stage, stage),
            ))  # fmt: skip
        return tuple(found)

    def _packing(self, source: int, target: int) -> Packing | None:
        """How the plan packs what one stage sends another: values, or gradients of what came from there."""
        first = 0
        for replica in self._plan.replicas:
            for edge in replica.edges:
                packed = edge.forward_compression if source < target else edge.backward_compression
                if packed is not None and {first + edge.source, first + edge.target} == {source, target}:
                    return packed.packing
            first += len(replica.stages)
        return None

    def _window(self, a: int, b: int) -> int:
        """Room for every micro-batch that can be in flight between two stages, both graphs, shared parameters and
        sums."""
        size = self.job.micro_batch_size
        total = SPARE_WINDOW_BYTES
        for graphs in ([p.train for p in self.stages], [p.evaluation for p in self.stages]):
            for graph in graphs:
                crossing = [c.spec.nbytes(size) for c in graph.sends if {c.source, c.target} == {a, b}]
                total += self.job.training.micro_batches * sum(crossing)
        first = 0
        for replica in self._plan.replicas:
            ends = {a - first, b - first}
            total += 4 * sum(p.size_bytes for p in replica.shared if ends <= {p.owner, *p.users})
            first += len(replica.stages)
        pair = {self._plan.devices[a], self._plan.devices[b]}
        return total + 2 * sum(g.size_bytes for g in self._plan.sync.groups if pair <= set(g.devices))

    def weights(self, device: str) -> Mapping[str, Tensor]:
        """Values of the variables that a device's stage uses, and the optimizer state of those that it owns."""
        pair = self._by_device[device]
        names = {op.target for op in (*pair.train.variables(), *pair.evaluation.variables())}
        prefixes = tuple(f"{OPTIMIZER}{name}." for name in pair.owned)
        values = self._weights | self._others.get(self._replica(pair), {})
        return {k: v for k, v in values.items() if k in names or k.startswith(prefixes)}

    def _replica(self, pair: StagePair) -> int:
        firsts = sorted({p.view.first for p in self.stages})
        return firsts.index(pair.view.first)

    def check_state(self, device: str, tensors: Sequence[TensorHeader]) -> None:
        pair = self._by_device[device]
        saves = self._saves(pair)
        names = pair.written if saves is None else saves
        expected = {name: tuple(self._weights[name].shape) for name in names}
        for header in tensors:
            parameter, _, _ = header.name.removeprefix(OPTIMIZER).rpartition(".")
            if header.name in expected:
                fits = header.shape == expected.pop(header.name)
            else:
                optimizes = saves is None and header.name.startswith(OPTIMIZER) and parameter in pair.owned
                fits = optimizes and header.shape in ((), tuple(self._weights[parameter].shape))
            if not fits:
                raise PeerError(f"saved {header.name!r} of shape {list(header.shape)}, which is not of its stage")
        if expected:
            raise PeerError(f"saved no {min(expected)!r}, which is of its stage")

    def advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        self._watcher.advanced(item, loss, spans)

    def saved(self, item: Item, device: str, state: Mapping[str, Tensor]) -> None:
        pair = self._by_device[device]
        replica, stage = self._replica(pair), f"stage-{pair.view.stage - pair.view.first}"
        if not replica:
            self._writer.write(item.step, stage, state)
        elif state:
            own = {f"{replica_prefix(replica)}{name}": value for name, value in state.items()}
            self._writer.write(item.step, f"replica-{replica}-{stage}", own)

    def commit(self, item: Item) -> None:
        t = self.job.training
        self._writer.write(item.step, "rest", self._rest)
        directory = self._writer.commit(Manifest(
            step=item.step, seed=t.seed, batch=t.batch_size, shuffle=t.shuffle, data=self._prepared.fingerprints
        ))  # fmt: skip
        self._watcher.saved(item.step, directory)


def train(
    prepared: Prepared, plan: Plan, fleet: Fleet, folder: Path, options: RunOptions, watcher: Watcher
) -> Outcome:
    """Run the job to its end. Raises UserError for what a device refused; a lost device is an outcome."""
    refuse_shared_devices(plan)
    script = TrainingScript(prepared, plan, fleet, folder, options, watcher)
    watcher.accepted()
    job = prepared.job
    machine = Coordinator(plan.devices, run_spec(prepared, script.start_step))
    conductor = Conductor(machine, script.run, script, patience_s=job.patience_s)
    call = Call(
        run=script.run, devices=plan.devices, patience_s=job.patience_s, threads=job.runtime.threads,
        logs=folder / "logs",
    )  # fmt: skip
    with options.crew.at_work(call, conductor.reception) as ended:
        outcome = conductor.conduct(ended)
    if isinstance(outcome.failure, UserError):
        raise outcome.failure
    return outcome


def check_outcome(outcome: Outcome) -> None:
    """PeerError for a run that ended because a device was lost."""
    if outcome.outcome == "lost":
        raise outcome.failure or PeerError(outcome.reason)
