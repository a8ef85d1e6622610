"""`isthmus audit`: steps of a run computed again, and compared with what its devices reported of them."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from isthmus.api.folder import RunFolder
from isthmus.api.given import is_given
from isthmus.combinations import refused
from isthmus.documents import numbered
from isthmus.errors import Interrupted, IsthmusError, UserError
from isthmus.fleet import Fleet, Link, Links
from isthmus.graph import StageGraph
from isthmus.graph.boundaries import watched_name, watched_node, with_boundaries
from isthmus.job import Job, PlanConfig, Prepared, fleet_of, kept_prepared, prepare
from isthmus.planners import plan as make_plan
from isthmus.plans import Plan
from isthmus.plans.plan import device_of
from isthmus.protocol.fingerprints import GRADIENTS, STATE, Reports, StepFinding, judge
from isthmus.runtime.coordinator.backend import Backend, LocalBackend, local_places
from isthmus.runtime.coordinator.data_holders import DataHolders
from isthmus.runtime.coordinator.fingerprint_log import Fingerprinted, read_fingerprints
from isthmus.runtime.coordinator.run import RunOptions, Watcher, check_outcome, run_plan
from isthmus.runtime.coordinator.stages import StagePair, readers, stage_pairs
from isthmus.runtime.messages.assignment import Fingerprinting
from isthmus.runtime.processes.signals import Stop
from isthmus.training.checkpoint import checkpoint_before
from isthmus.training.digests import fold
from isthmus.training.snapshot import part_of

LATENCY_S, BYTES_PER_S = 0.01, 12.5e6  # links between idle devices: no plan of an audit need be the best
Leaves = dict[str, dict[str, str]]


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    step: int
    after: int  # steps that were done at the checkpoint; 0: the beginning
    compared: int  # digests
    devices: tuple[str, ...]  # whose reports were compared
    missing: tuple[str, ...]  # devices that reported nothing of some step: they were lost before they did
    wrong_step: int | None = None  # the first that is not as it should be
    findings: tuple[StepFinding, ...] = ()  # who computed wrong in it

    @property
    def holds(self) -> bool:
        return self.wrong_step is None

    def lines(self) -> list[str]:
        found = [f"{name}: reported nothing of some step" for name in self.missing]
        for finding in self.findings:
            who = " or ".join(finding.workers)
            found.append(f"step {self.wrong_step}: {who} computed wrong: {', '.join(finding.nodes)}")
        if self.holds:
            who = ", ".join(self.devices)
            found.append(f"{_steps(self.after, self.step)}: as computed again, {self.compared} digests of {who}")
        return found


def audit_run(
    run: Path,
    step: int,
    fleet: str | None = None,
    note: Callable[[str], None] = lambda _: None,
    stop: Stop | None = None,
    idle: IdleDevices | None = None,
) -> Audited:
    """Compute the run again from the newest checkpoint before a step until the step, and compare.

    By default with the run's own plan, over processes of this machine; with `fleet` cut for that one; with `idle` cut
    for devices that have nothing to do. UserError where the bits would not be the same, nothing was kept to compare
    with, or no device is idle; Interrupted where it was to stop.
    """
    folder = RunFolder.existing(run)
    folder.check_kind("pipeline")
    job = folder.job()
    kept = read_fingerprints(folder.path)
    if not kept:
        raise UserError(
            f"run folder {run}: has no fingerprints, expected a run with `fingerprints = true` in [runtime]"
        )
    if step not in kept:
        raise UserError(
            f"--step: got {step}, expected a step of which something was reported: {min(kept)} to {max(kept)}"
        )
    after, checkpoint = checkpoint_before(folder.checkpoints, step)
    periods = _periods({n: one for n, one in kept.items() if after < n <= step})
    unreported = set(range(after + 1, step + 1)) - kept.keys()
    silent = {device_of(worker) for worker in kept[step].plan.worker_ids} if unreported else set[str]()
    found = Audited(run=str(run), step=step, after=after, compared=0, devices=(), missing=tuple(sorted(silent)))
    for period in periods:
        last = max(period)
        plan, key = period[last].plan, period[last].key
        cut_job = job.cut_into(plan.micro_batches)
        check_can_audit(cut_job, plan, folder.fleet(), after)
        prepared = kept_prepared(cut_job, folder.captured) or prepare(cut_job)
        others = None if fleet is None else fleet_of(msgspec.structs.replace(job, fleet=fleet, devices=None))
        if idle is not None:
            others = idle.of(folder.fleet(), plan)
        if others is not None or len(periods) > 1:
            check_any_cut(prepared, plan)
        where = dict(period[last].accelerators)
        if others is None:
            again = _own_cut(prepared, plan, folder.fleet(), where)
        else:
            again = _other_cut(prepared, plan, others, where)
        begins = "the beginning" if checkpoint is None else f"the checkpoint of step {after}"
        note(f"computing {_steps(after, last)} again from {begins}, on {', '.join(again.plan.used)}")
        found = _judged(found, period, _computed(again, checkpoint, key, last, stop or Stop(), idle))
        if not found.holds:
            break
    return found


def _periods(kept: Mapping[int, Fingerprinted]) -> list[dict[int, Fingerprinted]]:
    """Steps under one plan and one key together. Each is compared for itself, the first one first: a fault of an
    earlier plan makes every later step differ, and none of its devices is to be blamed for that."""
    found: list[dict[int, Fingerprinted]] = []
    for number in sorted(kept):
        one = kept[number]
        before = next(iter(found[-1].values())) if found else None
        if before is None or (before.plan, before.key) != (one.plan, one.key):
            found.append({})
        found[-1][number] = one
    return found


class IdleDevices(NamedTuple):
    """Where devices are that have nothing to do, and who has the run's data."""

    backend: Backend
    holders: DataHolders

    def of(self, fleet: Fleet, plan: Plan) -> Fleet:
        """Some that compute as the plan's devices do, in the fleet or not. UserError where there are none."""
        found = self.backend.idle(plan.used)
        if not found:
            raise UserError("audit: no device is idle that is of the hardware of those in the plan")
        like = min((fleet.device(name) for name in plan.used), key=lambda device: device.memory_bytes)
        devices = tuple(msgspec.structs.replace(like, name=name) for name in found[: len(plan.used)])
        return Fleet(name="idle devices", devices=devices, links=Links(default=Link(LATENCY_S, BYTES_PER_S)))


def _computed(
    again: _Again, checkpoint: Path | None, key: bytes, until: int, stop: Stop, idle: IdleDevices | None
) -> dict[int, Reports]:
    """Compute the reports that were due of each step until this one."""
    backend: Backend = LocalBackend(places=local_places(again.accelerators, again.fleet.names))
    prepared, holders = again.prepared, None
    if idle is not None:
        backend, holders = idle
        prepared = msgspec.structs.replace(prepared, computes=backend.computes)
        holders.ask(readers(again.plan, prepared.captured, evaluates=False))  # other data have other bits
    with tempfile.TemporaryDirectory() as temporary:
        options = RunOptions(
            emulate=False,
            resume_from=checkpoint,
            fingerprints=Fingerprinting(key=key, leaves=True),
            until=until,
            stop=stop,
            backend=backend,
            holders=holders,
            yields=True,
        )
        outcome = run_plan(prepared, again.plan, again.fleet, Path(temporary), options, Watcher())
        check_outcome(outcome)
        stop.check()
        return {n: again.expected(one) for n, one in read_fingerprints(Path(temporary)).items()}


def _steps(after: int, step: int) -> str:
    return numbered("step", range(after + 1, step + 1))


def _judged(found: Audited, kept: Mapping[int, Fingerprinted], expected: Mapping[int, Reports]) -> Audited:
    compared, missing, seen = found.compared, set(found.missing), set(found.devices)
    wrong_step: int | None = None
    findings: tuple[StepFinding, ...] = ()
    for number in sorted(kept):
        workers = kept[number].plan.worker_ids
        said = kept[number].workers
        reported = {stage: said[worker] for stage, worker in enumerate(workers) if worker in said}
        missing |= {device_of(w) for w in workers if w not in kept[number].workers}
        seen |= {device_of(w) for w in workers if w in kept[number].workers}
        compared += sum(len(nodes.keys() & expected[number].get(s, {}).keys()) for s, nodes in reported.items())
        findings = judge([device_of(w) for w in workers], reported, expected[number])
        if findings:
            wrong_step = number
            break
    return msgspec.structs.replace(
        found,
        compared=compared,
        devices=tuple(sorted(seen)),
        missing=tuple(sorted(missing)),
        wrong_step=wrong_step,
        findings=findings,
    )


class _Again(NamedTuple):
    prepared: Prepared
    plan: Plan
    fleet: Fleet
    accelerators: dict[str, str]  # where devices of this machine compute, if not on the CPU
    expected: Callable[[Fingerprinted], Reports]
    """The reports that were due from the run's workers, from those of this plan's workers."""


def _own_cut(prepared: Prepared, plan: Plan, fleet: Fleet, accelerators: dict[str, str]) -> _Again:
    def expected(one: Fingerprinted) -> Reports:
        by_stage = {stage: _by_node(one.workers.get(worker, {})) for stage, worker in enumerate(plan.worker_ids)}
        return {s: {node: fold(one.key, of) for node, of in nodes.items()} for s, nodes in by_stage.items()}

    return _Again(prepared, plan, fleet, accelerators, expected)


def _other_cut(prepared: Prepared, plan: Plan, fleet: Fleet, accelerators: Mapping[str, str]) -> _Again:
    job = msgspec.structs.replace(
        prepared.job,
        planner="even",
        schedule="1f1b",
        plan=PlanConfig(),
        compression=None,
        runtime=msgspec.structs.replace(
            prepared.job.runtime, changes=(), snapshots=False, device="cpu", engine="torch"
        ),
    )
    pairs = stage_pairs(plan, prepared.captured, clips=False)
    watched = with_boundaries(prepared.flow, [pair.train for pair in pairs])
    captured = msgspec.structs.replace(prepared.captured, train=watched)
    other = msgspec.structs.replace(prepared, job=job, captured=captured)
    made = make_plan(job.planner, other.problem(fleet))
    for pair in stage_pairs(made, captured, clips=False):
        _check_once(pair.train, fleet.name)

    def expected(one: Fingerprinted) -> Reports:
        leaves: Leaves = {}
        for found in one.workers.values():
            for node, of in _by_node(found).items():
                leaves.setdefault(node, {}).update(of)
        return {stage: _of_stage(pair, pairs, leaves, one.key) for stage, pair in enumerate(pairs)}

    return _Again(other, made, fleet, _alike(plan, fleet, accelerators), expected)


def _alike(plan: Plan, fleet: Fleet, accelerators: Mapping[str, str]) -> dict[str, str]:
    """All devices of another fleet where those of the plan computed. UserError where these did in several places."""
    places = {accelerators.get(name, "cpu") for name in plan.used}
    if len(places) > 1:
        raise refused("several accelerators", "another cut", " and ".join(sorted(places)))
    return dict.fromkeys(fleet.names, places.pop())


def _of_stage(pair: StagePair, pairs: tuple[StagePair, ...], leaves: Leaves, key: bytes) -> dict[str, str]:
    """Return the leaves that were due from a stage of the run's cut."""
    found: Leaves = {}
    for c in (*pair.train.receives, *pair.train.sends):
        receives = c.target == pair.train.index
        other = c.source if receives else c.target
        for parcel, sent in (("forward", not receives), ("backward", receives)):
            if parcel == "backward" and not c.gradient:
                continue
            seen = leaves.get(watched_node(watched_name(c), parcel), {})
            node = found.setdefault(f"{'sent' if sent else 'received'} {parcel} {other}", {})
            node.update({f"{number} {c.value.op}:{c.value.index}": digest for number, digest in seen.items()})
    for other in (p for p in pairs if p is not pair):
        for direction, sender in (("sent", pair), ("received", other)):
            norms, count = leaves.get("norms", {}), leaves.get("count", {})
            told = {f"-1 {number}": norms[name] for number, name in enumerate(sender.owned) if name in norms}
            found[f"{direction} norms {other.train.index}"] = told
            found[f"{direction} count {other.train.index}"] = {f"-1 {name}": digest for name, digest in count.items()}
    for node, names in ((GRADIENTS, frozenset(pair.owned)), (STATE, pair.written)):
        if node in leaves:
            found[node] = {name: digest for name, digest in leaves[node].items() if part_of(name) in names}
    return {node: fold(key, of) for node, of in found.items() if of}


def _by_node(digests: Mapping[str, str]) -> Leaves:
    found: Leaves = {}
    for name, digest in digests.items():
        node, _, leaf = name.partition("/")
        found.setdefault(node, {})[leaf] = digest
    return found


def check_can_audit(job: Job, plan: Plan, fleet: Fleet, after: int) -> None:
    """UserError where a step computed again would not have the same bits, on whatever cut."""
    edges = [edge for replica in plan.replicas for edge in replica.edges]
    packed = [e.backward_compression for e in edges if e.backward_compression is not None]
    engines = sorted({d.engine for d in fleet.devices if d.name in plan.used} - {"torch"})
    asked: dict[str, object] = {
        "Python objects": "some" if is_given(job) else "",
        "activation noise": "some" if job.privacy is not None else "",
        "compile": job.runtime.compile,
        "JAX": ", ".join(engines),
        "averaged replicas": plan.sync.averages if plan.sync.averages != "gradients" else "",
        "error feedback": bool(after) and any(packing.feedback for packing in packed),
    }
    for what, got in asked.items():
        if got:
            raise refused(what, "audit", got)


def check_any_cut(prepared: Prepared, plan: Plan) -> None:
    """UserError where the bits of a step depend on the cut."""
    replica, *others = plan.replicas
    edges, shared = replica.edges, replica.shared
    asked: dict[str, object] = {
        "several replicas": f"{len(plan.replicas)} of {len(plan.devices)} stages" if others or replica.copies else "",
        "delayed": "'delayed'" if prepared.job.schedule == "delayed" else "",
        "compression": any(e.forward_compression or e.backward_compression for e in edges),
        "shared parameters": f"{shared[0].name!r}" if shared else "",
    }
    for what, got in asked.items():
        if got:
            raise refused(what, "another cut", got)


def _check_once(stage: StageGraph, fleet: str) -> None:
    values = [c.value for c in stage.sends]
    if len(set(values)) < len(values) or stage.shared_from:
        twice = "a value that goes to two stages" if not stage.shared_from else "a parameter that two stages share"
        raise refused("a value of two stages", "another cut", twice, f"--fleet {fleet}")


NICE = 19
AuditElsewhere = Callable[[int, Callable[[str], None], Stop], Audited]
"""Audits a step, with a function for notes, until it is to stop. Raises IsthmusError where that cannot be."""


def audit_command(run: Path, step: int) -> list[str]:
    return ["nice", "-n", f"{NICE}", sys.executable, "-m", "isthmus", "audit", str(run), "--step", f"{step}"]


class BackgroundAudits:
    """A context manager: on leaving, an audit that is at work is ended.

    At each checkpoint it is drawn whether the steps since the one before are audited. No device knows before it has
    reported them. One audit works at a time: those that are drawn meanwhile are left out.
    """

    def __init__(
        self, run: Path, share: float, note: Callable[[str], None], elsewhere: AuditElsewhere | None = None
    ) -> None:
        """`note` gets what an audit found, in a thread of its own. Where an audit `elsewhere` cannot be, or finds
        something, a process of lowest priority audits here: an idle device may be the one that computes wrong."""
        self._run = run
        self._share = share
        self._note = note
        self._elsewhere = elsewhere
        self._stop = Stop()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.working: threading.Thread | None = None  # the thread of the newest audit; it ends with it

    def __enter__(self) -> BackgroundAudits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._starting:
            self._stop.request()
            if self._process is not None:
                # It removes its temporary folder. No Ctrl-C: who is started in the background inherits that it is
                # ignored.
                self._process.terminate()
        if self.working is not None:
            self.working.join()

    def saved(self, step: int) -> None:
        busy = self.working is not None and self.working.is_alive()
        if busy or secrets.randbelow(1 << 32) >= self._share * (1 << 32):
            return
        self.working = threading.Thread(target=self._audit, args=(step,), name="audit", daemon=True)
        self.working.start()

    def _audit(self, step: int) -> None:
        if not self._holds_elsewhere(step):
            self._audit_here(step)

    def _holds_elsewhere(self, step: int) -> bool:
        if self._elsewhere is None:
            return False
        try:
            found = self._elsewhere(step, self._tell, self._stop)
        except Interrupted:
            return False
        except IsthmusError as e:
            self._tell(f"{e}: on this machine")
            return False
        for line in found.lines():
            self._tell(line)
        return found.holds

    def _audit_here(self, step: int) -> None:
        with self._starting:
            if self._stop.requested:
                return
            self._process = process = subprocess.Popen(
                audit_command(self._run, step),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        said, _ = process.communicate()
        for line in said.splitlines():
            self._tell(line)

    def _tell(self, line: str) -> None:
        if not self._stop.requested:
            self._note(f"audit: {line.removeprefix('error: ').removeprefix('audit: ')}")
