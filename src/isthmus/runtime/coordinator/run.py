"""One training run: its devices, the coordinator, checkpoints, and what is left behind."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from isthmus.accelerators.copies import Fill
from isthmus.disclosure import PrivacySpent
from isthmus.errors import PeerError, UserError
from isthmus.fleet import Fleet
from isthmus.job import Job, Prepared
from isthmus.job.first_weights import FirstWeights
from isthmus.plans import Plan, PlanPeriod
from isthmus.plans.plan import device_of, is_first, worker_id
from isthmus.programs.pipeline import Pipeline
from isthmus.protocol import Item, Lineage, RunSpec, StateLayout
from isthmus.protocol.adaptation import Pair
from isthmus.protocol.draws import Draws
from isthmus.protocol.run_messages import WeightFile, WrittenPart
from isthmus.protocol.run_ports import EpochStart
from isthmus.protocol.step_failures import MemoryPeak
from isthmus.run_files import CHECKPOINTS
from isthmus.runtime.coordinator.activation_privacy import counted_samples, opened_ledger
from isthmus.runtime.coordinator.backend import Backend, LocalBackend, RunRequest
from isthmus.runtime.coordinator.data_holders import DataHolders, Digests, unchanged
from isthmus.runtime.coordinator.fingerprint_log import FingerprintLog, chosen_fingerprints
from isthmus.runtime.coordinator.host import CoordinatorHost
from isthmus.runtime.coordinator.parameter_store import ParameterStore, WeightFiles
from isthmus.runtime.coordinator.plans import Plans, SteadySeconds
from isthmus.runtime.coordinator.recovery_record import RecoveryRecord, remove_record, write_record
from isthmus.runtime.coordinator.run_callbacks import Address, FaultKind, Outcome, WeightAmounts, WeightExchanges
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.coordinator.stored_parts import StoredParts
from isthmus.runtime.messages.assignment import Assignment, Fingerprinting, Peer
from isthmus.runtime.processes.signals import Stop
from isthmus.session.session import START_S
from isthmus.trace import Span
from isthmus.training.checkpoint import CheckpointWriter, LandedPart, Manifest, read_manifest, replica_prefix
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import TensorHeader
from isthmus.training.stored import Sent
from isthmus.units import format_duration


def _most_leaves(prepared: Prepared) -> int:
    """Return the most leaves of a step's fingerprint in an audit: parameters and buffers, which are operators of the
    graph, with gradients, norms and the optimizers' state of them; values of each micro-batch, there and back."""
    return (8 + 2 * prepared.job.micro_batches) * len(prepared.captured.train.ops)


class Watcher(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that are called as the run advances."""

    accepted: Callable[[], None] = lambda: None
    """Everything was checked, the checkpoint to go on from too, and nothing was written yet."""
    planned: Callable[[Plan, int], None] = lambda plan, epoch: None
    """The run begins or goes on with this plan, in this epoch."""
    period: Callable[[PlanPeriod], None] = lambda period: None
    """The same, with the fleet as it is believed to be; its time is the monotonic clock's."""
    advanced: Callable[[Item, float | None, tuple[Span, ...]], None] = lambda item, loss, spans: None
    evaluated: Callable[[Item, Sequence[float]], None] = lambda item, sums: None
    """A part of an evaluation is done: its losses, counts, and sums and counts of metrics."""
    saved: Callable[[int, Path], None] = lambda step, directory: None
    acknowledged: Callable[[int], None] = lambda step: None
    """The state after this step is held twice: no single loss takes the run back behind it."""
    rolled_back: Callable[[int], None] = lambda step: None
    """The run goes on after this step: reports of later steps are void."""
    noted: Callable[[str], None] = lambda text: None
    late: Callable[[str, float], None] = lambda device, seconds: None
    """Tasks of an emulated device took so many seconds longer than they should."""
    fault: Callable[[FaultKind, str, str], None] = lambda kind, device, reason: None
    """A device joins, is lost or leaves."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one run that are not in its job."""

    emulate: bool = True
    resume_from: Path | None = None  # a checkpoint to go on from
    eval_due: bool = False  # the evaluation of that checkpoint's step was interrupted
    weights: Mapping[str, Tensor] | None = None
    """To begin with: every variable, by the module's own names. None: the module's first ones."""
    begun: Callable[[], FirstWeights] | None = None  # gives these, once, if they are being made already
    record: RecoveryRecord | None = None
    """The record of a run whose coordinator was lost: devices may be at work for it, and hold more than the
    checkpoint."""
    believed: Fleet | None = None  # the fleet as an earlier session of the run measured it, for plans; None: as stated
    backend: Backend = LocalBackend()  # who computes
    store: str = ""  # URL of the run's store, to which devices may write their parts of checkpoints; empty: of none
    holders: DataHolders | None = None  # who has the data; None: every device, and nobody compares
    stop: Stop = msgspec.field(default_factory=Stop)
    fingerprints: Fingerprinting | None = None  # how an audit has steps fingerprinted; None: as the job says
    first_step: int = 0  # steps that were made before, whose state is `weights`
    until: int | None = None  # the step to end after, and evaluate nothing; None: as the job says
    yields: bool = False  # a device that another run calls leaves this one
    exchanges: WeightExchanges | None = None  # who else changes the run's weights
    replan: Callable[[Fleet], Plan] | None = None
    """Plans for the devices that are left, or that came. None: the run ends when a device is lost."""
    steady_s: SteadySeconds | None = None  # compares another plan with the one in force; None: the formula does


def run_spec(prepared: Prepared, start_step: int = 0, *, eval_due: bool = False) -> RunSpec:
    """The counts of the job that the coordinator and the simulator schedule by. Raises UserError where the held-out
    samples do not fill a micro-batch."""
    job, t = prepared.job, prepared.job.training
    count, rest = prepared.eval_micro_batches, prepared.eval_rest
    if t.eval_every and not count and not rest:
        samples = min(t.eval_samples, prepared.samples.heldout)
        raise UserError(
            f"training.eval_samples: {samples} held-out samples are fewer than a micro-batch ({job.micro_batch_size}), "
            "expected as many, or more training.micro_batches"
        )
    return RunSpec(
        steps=t.steps,
        micro_batches=job.micro_batches,
        micro_batch_size=job.micro_batch_size,
        eval_every=t.eval_every,
        eval_micro_batches=count,
        eval_rest=rest,
        save_every=t.save_every,
        # A checkpoint and a snapshot may lie between steps that overlap: the step after them is begun before they are.
        lease_ahead=job.runtime.lease_ahead + (2 if job.schedule == "delayed" else 0),
        start_step=start_step,
        eval_due=eval_due,
        non_finite_steps=t.most_non_finite_steps,
        recovery_attempts=job.runtime.recovery_attempts,
    )


class RunController:
    """The run's side of the coordinator: what each device gets, and what becomes of what it returns."""

    def __init__(
        self, prepared: Prepared, plan: Plan, fleet: Fleet, folder: Path, options: RunOptions, watcher: Watcher
    ) -> None:
        self.job = prepared.job
        self._record = options.record
        self.run = self._record.run if self._record is not None else secrets.token_hex(16)
        self._prepared = prepared
        self._fleet = fleet
        self._folder = folder
        self._options = options
        self.watcher = watcher
        self._writer = CheckpointWriter(folder / CHECKPOINTS, keep=self.job.training.keep_checkpoints)
        first = self._record.plan if self._record is not None else plan
        self.plans = Plans(
            prepared,
            first,
            fleet,
            options.replan,
            believed=options.believed,
            emulate=options.emulate,
            repeats=options.exchanges is None,
            steady_s=options.steady_s,
        )
        self._lineage = Lineage(self._record.lineage if self._record is not None else ())
        self.peaks: dict[str, MemoryPeak] = {}  # peaks by device of the plan in force
        self._begun: EpochStart | None = None
        self._reached = 0  # steps that are done
        self._periods: list[PlanPeriod] = []  # since when by the monotonic clock
        self._holders = options.holders
        self.fingerprints = FingerprintLog(
            folder,
            options.fingerprints or chosen_fingerprints(self.job),
            self.job.training.steps,
            options.backend.accelerators if isinstance(options.backend, LocalBackend) else {},
            leaves=_most_leaves(prepared),
        )
        self._values = ParameterStore(
            prepared, self.now.written, options.weights, self.watcher.noted, folder, options.begun
        )
        self._files = WeightFiles(str(self.job.model.options["path"]) if self.job.model.is_pretrained else "")
        self._parts = StoredParts(options.store)
        self._ledger = opened_ledger(folder, self.now.protection.noise, counted_samples(prepared))
        self._loaded_step: int | None = None  # the step of the state that `_values` are; None when they are of several
        resumes = options.resume_from
        self.start_step = options.first_step if resumes is None else self._begun_from(resumes)
        if self._record is None:
            self._load(options.resume_from)

    @property
    def spent(self) -> PrivacySpent | None:
        """The privacy that messages have spent, where noise covers them. Nothing is sent any more."""
        return self._ledger.close() if self._ledger is not None else None

    @property
    def now(self) -> StageAssignments:
        """The assignments of the plan that is in force. Any thread."""
        return self.plans.now

    def program(self) -> Pipeline:
        """Return the program of this run, new or started again."""
        spec = run_spec(self._prepared, self.start_step, eval_due=self._options.eval_due)
        if (until := self._options.until) is not None:
            spec = msgspec.structs.replace(spec, steps=until, eval_every=0)
        return Pipeline(
            self.now.plan.worker_ids,
            spec,
            timeout_s=self.job.timeout_s,
            start_s=START_S,
            layout=self.now.layout if self._options.replan is not None else None,
            lineage=self._lineage if self._record is not None else None,
            adaptation=self.plans.adaptation(until or self.job.training.steps),
        )

    def _begun_from(self, checkpoint: Path) -> int:
        """The step of the checkpoint to go on from. UserError where the run cannot."""
        manifest = manifest_of(self.job, checkpoint)
        if self._holders is not None and manifest.data and not unchanged(manifest.data, self._holders.digests):
            self.watcher.noted(
                "resume: cannot check whether the data are those of before: of the devices that had them "
                f"({', '.join(manifest.data)}) none is here with the same key"
            )
        return manifest.step

    def _load(self, checkpoint: Path | None) -> None:
        """The checkpoint's values, or at the very beginning the model's own."""
        if checkpoint is None:
            self._values.begin()
            self._loaded_step = self.start_step
        else:
            self._loaded_step = manifest_of(self.job, checkpoint).step
            self._values.load(checkpoint)
        read = checkpoint is not None and self._values.reads(checkpoint)
        self._writer.in_use = checkpoint.resolve() if checkpoint is not None and read else None

    def begin(self, start: EpochStart, layout: StateLayout) -> None:
        """An epoch begins. What it goes on from is on record when this returns."""
        self.plans.begin(layout)
        self._reached = start.step
        self.peaks.clear()
        self._periods.append(self._period(start.step, time.monotonic()))
        first, self._begun = self._begun is None and self._record is None, start
        self._lineage.begin(start.epoch, start.step)
        self.watcher.planned(self.now.plan, start.epoch)
        self.watcher.period(self._periods[-1])
        if self._options.backend.survives_coordinator and self._options.exchanges is None:
            write_record(self._folder, RecoveryRecord(run=self.run, lineage=self._lineage.began, plan=self.now.plan))
        if not start.from_checkpoint:
            self._loaded_step = None
            self._values.forget_others()
        elif self._loaded_step != start.step:
            # By its step: a newer one may be there that the run was not resumed from, because it is torn.
            resumed = start.step == self.start_step
            self._load(self._options.resume_from if resumed else self._writer.at(start.step))
        if not first:
            self._writer.discard()
            self.watcher.rolled_back(start.step)

    def _period(self, step: int, now_s: float) -> PlanPeriod:
        return PlanPeriod(plan=self.now.plan, fleet=self.now.fleet, first_step=step, since_s=now_s)

    def periods(self, origin_s: float) -> tuple[PlanPeriod, ...]:
        """The run's plans, in seconds since the origin."""
        found = self._periods or [self._period(self.start_step, origin_s)]
        return tuple(msgspec.structs.replace(p, since_s=max(0.0, p.since_s - origin_s)) for p in found)

    def assignments(self, addresses: Mapping[str, Address]) -> Mapping[str, Assignment]:
        begun = self._begun or EpochStart(0, self.start_step, 0, True)
        ahead = run_spec(self._prepared, self.start_step).lease_ahead
        found = self.now.assignments(self.run, begun, addresses, ahead)
        digests, fingerprints = self._digests, self.fingerprints.settings
        self._parts.begin()
        self.fingerprints.begin(begun.step, self.now.plan)
        return {
            d: msgspec.structs.replace(
                entry,
                digests=digests.get(device_of(d), {}),
                fingerprints=fingerprints,
                store=self._parts.place(*self._part(d)),
            )
            for d, entry in found.items()
        }

    def peers(self, device: str, others: Collection[str], addresses: Mapping[str, Address]) -> tuple[Peer, ...]:
        return tuple(self.now.peer(device, other, addresses[other], self._reached) for other in sorted(others))

    @property
    def _digests(self) -> Digests:
        return self._holders.digests if self._holders is not None else {}

    def is_known(self, device: str) -> bool:
        """Return whether plans can be made with a device that came: it was asked what data it has."""
        return self._holders is None or self._holders.is_known(device)

    def weights(self, device: str, own: frozenset[str]) -> Mapping[str, Sent]:
        """Values of the variables that a device's stage uses, and the optimizer state of those that it owns."""
        names, prefixes = self.now.needs(device)
        return self._values.of(names, prefixes, replica=self.now.replica(device), without=own)

    def elsewhere(self, values: Mapping[str, Sent]) -> tuple[tuple[WeightFile, ...], Draws | None]:
        """The files of a pretrained model that values are in, which devices may have too, and the draws that others
        are."""
        return self._files.of(values), self._files.drawn(values, self._values.draws, self.job.training.seed)

    def updates(self) -> tuple[frozenset[str], EngineConfig]:
        """The parts that optimizers update, and the engine's settings for that."""
        return self.now.owned, self.job.engine()

    def opened(self, item: Item) -> WeightAmounts | None:
        """Devices are about to hear of the item: what it makes leave them is on record when this returns."""
        if self._ledger is not None:
            self._ledger.opened(item, self.job.micro_batch_size, self.now.protection)
        exchanges = self._options.exchanges
        return exchanges.opened(item) if exchanges is not None and item.kind == "train" else None

    def advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        self.watcher.advanced(item, loss, spans)
        if self._ledger is not None and (entry := self._ledger.after(item, self.job.training.batch_size)):
            self.watcher.noted(entry)
        if item.kind == "train":
            self._reached = item.step + 1

    def emulated(self, link: Pair) -> float | None:
        """Bytes/s of a link that is emulated here. Any thread."""
        return self.plans.emulated(link, self._reached)

    def fault(self, kind: FaultKind, worker: str, reason: str = "") -> None:
        if kind == "joined" or is_first(worker):  # its further workers are lost with it, and leave with it
            self.watcher.fault(kind, device_of(worker), reason)

    def land(self, device: str, tensors: Sequence[TensorHeader], fill: Fill) -> LandedPart:
        """Bring a device's part of a checkpoint to disk as it comes. Any thread."""
        return self._writer.land(tensors, fill, self._part(device)[1])

    def placed(self, item: Item) -> Item:
        """The item as devices get it: with the places where parts of a checkpoint may go."""
        return msgspec.structs.replace(item, to_store=item.kind == "save" and self._parts.opened)

    def doubt(self, device: str, item: Item, written: WrittenPart) -> str:
        """Why a part in the store is not what its device says; empty if it is. Any thread."""
        return self._parts.doubt(item.step, self._part(device), written)

    def saved(self, item: Item, device: str, landed: LandedPart | WrittenPart | None, peak: MemoryPeak | None) -> None:
        """`landed` is None of a device that sent no tensors."""
        if peak is not None:
            self._peaked(device_of(device), peak)
        part, prefix = self._part(device)
        if isinstance(landed, WrittenPart):
            self._writer.keep_written(item.step, self._parts.name(part), landed)
        elif landed is not None:
            self._writer.keep(item.step, part, landed)
        elif not prefix:
            self._writer.write(item.step, part, {})

    def _part(self, device: str) -> tuple[str, str]:
        """The name of a device's part of a checkpoint, and what stands before its tensors' names there."""
        pair, replica = self.now.by_worker_id[device], self.now.replica(device)
        stage = f"stage-{pair.view.stage - pair.view.first}"
        main = not replica and not pair.copy
        return (stage, "") if main else (f"replica-{replica}-{stage}", replica_prefix(replica))

    def weights_read(self, item: Item, weights: Mapping[str, Tensor]) -> None:
        assert self._options.exchanges is not None, "only they want weights"
        self._options.exchanges.collected(item, weights)

    def _peaked(self, device: str, peak: MemoryPeak) -> None:
        """All stages of a device report the memory of one process."""
        before = self.peaks.get(device, peak)
        self.peaks[device] = max(before, peak, key=lambda found: found.size_bytes)

    def give_up(self, item: Item) -> None:
        """There is no checkpoint of this step. The next one goes to the coordinator."""
        self._parts.opened = False
        self._writer.give_up(item.step)

    def commit(self, item: Item, *, finite: bool) -> None:
        t = self.job.training
        self._writer.write(item.step, "rest", self._values.rest)
        directory = self._writer.commit(
            Manifest(
                step=item.step,
                seed=t.seed,
                batch=t.batch_size,
                shuffle=t.shuffle,
                finite=finite,
                base=self._values.base,
                data={device: dict(entry) for device, entry in self._digests.items()},
            )
        )
        self.watcher.saved(item.step, directory)


def run_plan(
    prepared: Prepared, plan: Plan, fleet: Fleet, folder: Path, options: RunOptions, watcher: Watcher
) -> Outcome:
    """Run the job to its end. Raises UserError for what a device refused; a lost device that the run cannot go on
    without is an outcome."""
    callbacks = RunController(prepared, plan, fleet, folder, options, watcher)
    watcher.accepted()
    job, first = prepared.job, callbacks.now.plan.used
    others = tuple(name for name in fleet.names if name not in first) if options.replan is not None else ()
    stages = _most_stages(callbacks.now.plan)
    further = [worker_id(device, number) for device, count in stages.items() for number in range(1, count)]
    host = CoordinatorHost(
        callbacks.program(),
        callbacks.run,
        callbacks,
        timeout_s=job.timeout_s,
        others=(*others, *further),
    )
    # Who works for a run whose coordinator was started again comes by itself; who does not is lost, like any other.
    called, callable_later = ((), (*first, *others)) if options.record is not None else (first, others)
    call = RunRequest(
        run=callbacks.run,
        devices=called,
        others=callable_later,
        timeout_s=job.timeout_s,
        threads=job.runtime.threads,
        logs=folder / "logs",
        stages=stages,
        yields=options.yields,
        stop=options.stop,
    )
    with options.backend.at_work(call, host.acceptor) as work:
        outcome = host.coordinate(work, options.stop)
    remove_record(folder)
    outcome = msgspec.structs.replace(
        outcome, periods=callbacks.periods(outcome.origin_s), spent=callbacks.spent, peaks=callbacks.peaks
    )
    if isinstance(outcome.failure, UserError):
        raise outcome.failure
    return outcome


def _most_stages(plan: Plan) -> dict[str, int]:
    """Return how many stages each device may get, for those that may get several: where labels stay, a data holder gets
    the first and the last stage under this plan or a later one."""
    found = Counter(plan.devices)
    if plan.constraints.labels_stay:
        found |= Counter(dict.fromkeys(plan.constraints.data_holders, 2))
    return {device: count for device, count in found.items() if count > 1}


def check_outcome(outcome: Outcome) -> None:
    """PeerError for a run that ended because a device was lost, Diverged for one whose numbers are not finite."""
    if outcome.outcome in ("lost", "diverged"):
        raise outcome.failure or PeerError(outcome.reason)


LATE_SHARE = 0.02  # the share of the time by which the tasks of an emulated device may take longer than they should


def late_warnings(late_s: Mapping[str, float], elapsed_s: float) -> list[str]:
    """A line for each emulated device that this host was too slow for: emulation is honest only while the host computes
    faster than the devices that it plays."""
    return [
        f"warning: this computer is too slow to emulate {device}: {format_duration(late)} of "
        f"{format_duration(elapsed_s)} were lost; set runtime.emulate = false, or use fewer devices"
        for device, late in late_s.items()
        if late > LATE_SHARE * elapsed_s
    ]


def manifest_of(job: Job, checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint that the job goes on from. UserError where it cannot."""
    manifest = read_manifest(checkpoint)
    for field, got, saved in (
        ("training.seed", job.training.seed, manifest.seed),
        ("training.batch_size", job.training.batch_size, manifest.batch),
        ("training.shuffle", job.training.shuffle, manifest.shuffle),
    ):
        if got != saved:
            raise UserError(f"resume: {field}: got {got}, the checkpoint {checkpoint.name} was made with {saved}")
    return manifest
