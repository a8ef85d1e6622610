"""`isthmus audit` accepts what was computed right and names the device that changed one bit; devices are threads."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.api import audit
from isthmus.api.audit import Audited, BackgroundAudits, IdleDevices, audit_run, check_can_audit
from isthmus.api.folder import RunFolder
from isthmus.cli import main
from isthmus.cost import build_plan
from isthmus.errors import Interrupted, UserError
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import dump_fleet
from isthmus.job import Job, Prepared, keep_prepared, prepare, prepared_again
from isthmus.protocol.fingerprints import StepFinding, StepFingerprint
from isthmus.run_files import FINGERPRINTS
from isthmus.runtime.coordinator.data_holders import DataHolders
from isthmus.runtime.coordinator.fingerprint_log import FingerprintLog, read_fingerprints
from isthmus.runtime.device.device import DeviceWorker
from isthmus.runtime.messages.assignment import Fingerprinting
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.processes.signals import Stop
from isthmus.training.engine import Engine
from tests.accelerators.thread_backend import ThreadCrew
from tests.tiers import represented_by

from .jobs import DIGITS, TEXT, final_weights, fleet_of, job_of, random_cut

GPT = {"vocab_size": 256, "sequence_length": 16, "width": 16, "layers": 2, "heads": 2, "dropout": 0.1}
STEPS, WRONG_STEP, WRONG = 4, 2, "d1"
"""The step with the fault has two done before it, and a checkpoint of these."""


def threads(**_: object) -> ThreadCrew:
    return ThreadCrew(accelerators=defaultdict(lambda: "cpu"))


@pytest.fixture(autouse=True)
def _in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LocalBackend", threads)


def of(model: str, options: dict[str, object], *, fingerprints: bool = True, **training: object) -> Job:
    job = job_of(model, options, DIGITS if model == "mlp" else TEXT, **training)
    runtime = msgspec.structs.replace(job.runtime, fingerprints=fingerprints)
    return msgspec.structs.replace(job, runtime=runtime)


@pytest.fixture(scope="module")
def gpt() -> Prepared:
    return prepare(of("gpt", GPT, steps=STEPS, save_every=2, clip_norm=1.0))


def trained(prepared: Prepared, folder: Path, stages: int = 3, crew: Callable[[], ThreadCrew] = threads) -> Path:
    """A run's folder."""
    fleet = fleet_of(stages)
    cut = random_cut(prepared, stages, seed=5, once=True)
    plan = build_plan(prepared.problem(fleet), fleet.names, cut, planner="test")
    kept = RunFolder(folder)
    kept.begin(prepared.job, fleet, plan, 0)
    keep_prepared(prepared, kept.captured)  # as a fleet does: no audit captures again
    found = run_plan(prepared, plan, fleet, folder, RunOptions(emulate=False, backend=crew()), Watcher())
    assert found.outcome == "done", found.reason
    return folder


@pytest.fixture(scope="module")
def honest(gpt: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(gpt, tmp_path_factory.mktemp("honest") / "run")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A fleet of two devices, where the run had three."""
    path = tmp_path_factory.mktemp("fleet") / "other.toml"
    path.write_text(dump_fleet(fleet_of(2)))
    return str(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("fleet") / "alone.toml"
    path.write_text(dump_fleet(fleet_of(1)))
    return str(path)


def test_an_honest_run_is_accepted_on_every_cut(honest: Path, other: str, alone: str) -> None:
    for fleet in (None, other, alone):
        found = audit_run(honest, STEPS, fleet)
        assert (found.findings, found.wrong_step, found.after, found.missing) == ((), None, 2, ())
        assert found.devices == ("d0", "d1", "d2")
        # By step: messages both ways over two boundaries at both ends, norms from each to each at both ends, and
        # gradients; at the end the state.
        assert found.compared == 2 * (8 + 12 + 3) + 3
    assert audit_run(honest, 2).after == 0


def flip(tensor: Tensor) -> None:
    """The lowest bit of one element."""
    tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)


Spoil = Callable[[Engine, Callable[[], bool]], None]
"""Changes an engine; what it is given says whether it is in the step with the fault."""


def wrong_gradient(engine: Engine, now: Callable[[], bool]) -> None:
    collect = engine.collect

    def collected(count: float | None) -> Tensor:
        norms = collect(count)
        if now():
            flip(next(iter(engine.gradients().values())))
        return norms

    engine.collect = collected  # type: ignore[method-assign]


def wrong_update(engine: Engine, now: Callable[[], bool]) -> None:
    update, weight = engine.update, next(name for name in engine.state() if name.endswith("weight"))

    def updated(step: int, norms: Tensor | None) -> None:
        update(step, norms)
        if now():
            flip(engine.state()[weight])

    engine.update = updated  # type: ignore[method-assign]


def wrong_value(method: str) -> Spoil:
    """Of the third micro-batch."""

    def spoil(engine: Engine, now: Callable[[], bool]) -> None:
        right = getattr(engine, method)

        def spoilt(*arguments: object) -> Mapping[object, Tensor]:
            found: Mapping[object, Tensor] = right(*arguments)
            micro_batch = arguments[-2]
            if now() and micro_batch == 2:
                found = {ref: value.clone() for ref, value in found.items()}
                flip(next(iter(found.values())))
            return found

        setattr(engine, method, spoilt)

    return spoil


@contextlib.contextmanager
def faulty(spoil: Spoil) -> Generator[None]:
    """One device computes wrong in one step."""
    make = DeviceWorker._engine

    def made(worker: DeviceWorker, *arguments: object) -> Engine:
        engine = make(worker, *arguments)  # type: ignore[arg-type]
        if worker._site.device != WRONG:
            return engine
        done = 0
        spoil(engine, lambda: done == WRONG_STEP)
        update = engine.update

        def counted(step: int, norms: Tensor | None) -> None:
            nonlocal done
            update(step, norms)
            done = step + 1

        engine.update = counted  # type: ignore[method-assign]
        return engine

    with mock.patch.object(DeviceWorker, "_engine", made):
        yield


FAULTS: Mapping[str, tuple[Spoil, int, str]] = {
    "gradient": (wrong_gradient, WRONG_STEP + 1, "gradients"),
    "forward": (wrong_value("forward"), WRONG_STEP + 1, "sent forward 2"),
    "backward": (wrong_value("backward"), WRONG_STEP + 1, "sent backward 0"),
    "update": (wrong_update, WRONG_STEP + 2, "sent forward 2"),  # its state too, after what others sent back
}
"""By what is wrong in one bit: the step in which it shows, and where."""


@pytest.mark.parametrize("fault", represented_by(FAULTS, "gradient"))
def test_one_wrong_bit_is_found_and_its_device_named(fault: str, gpt: Prepared, other: str, tmp_path: Path) -> None:
    spoil, step, node = FAULTS[fault]
    with faulty(spoil):
        trained(gpt, tmp_path / "run")
    for fleet in (None, other) if fault == "gradient" else (other,):
        found = audit_run(tmp_path / "run", STEPS, fleet)
        assert not found.holds and found.wrong_step == step
        (finding,) = found.findings
        assert finding.workers == (WRONG,) and node in finding.nodes
    assert found.lines() == [f"step {step}: {WRONG} computed wrong: {', '.join(finding.nodes)}"]


@pytest.mark.long
def test_the_bits_of_a_hundred_steps_are_those_without_fingerprints_and_of_another_cut(
    alone: str, tmp_path: Path
) -> None:
    weights: list[dict[str, Tensor]] = []
    prepared: Prepared | None = None
    for fingerprints in (True, False):
        job = of("mlp", {"layers": 2}, fingerprints=fingerprints, steps=100, micro_batches=2)
        prepared = prepare(job) if prepared is None else prepared_again(prepared, job)
        weights.append(final_weights(trained(prepared, tmp_path / str(fingerprints), stages=2)))
    on, off = weights
    assert on.keys() == off.keys() and all(torch.equal(on[name], off[name]) for name in on)
    kept = read_fingerprints(tmp_path / "True")
    assert list(kept) == list(range(1, 101)) and all(len(one.workers) == 2 for one in kept.values())
    found = audit_run(tmp_path / "True", 100, alone)
    assert found.holds and found.after == 0 and found.compared >= 100 * 5  # in each, two messages at both ends
    assert not read_fingerprints(tmp_path / "False")
    with pytest.raises(UserError, match="has no fingerprints, expected a run with `fingerprints = true`"):
        audit_run(tmp_path / "False", 1)


ON_ACCELERATOR = dict.fromkeys(("d0", "d1", "d2"), ProcessPlace(accelerator="checked:0"))


@pytest.fixture
def _any_kernels_afterwards() -> Generator[None]:
    """Devices are threads of this process, which others use after them."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.long
@pytest.mark.usefixtures("_any_kernels_afterwards")
def test_what_an_accelerator_computed_is_computed_again_on_one(
    gpt: Prepared, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an emulated one, which finds tensors that are read before they are there."""

    def crew(places: Mapping[str, ProcessPlace] = ON_ACCELERATOR) -> ThreadCrew:
        return ThreadCrew(accelerators={name: place.accelerator for name, place in places.items()})

    monkeypatch.setattr(audit, "LocalBackend", crew)
    with pytest.raises(UserError, match=r"runtime.fingerprints: got true on .*: expected runtime.deterministic"):
        trained(gpt, tmp_path / "refused", crew=crew)  # with other bits an honest device would be named
    runtime = msgspec.structs.replace(gpt.job.runtime, deterministic=True)
    prepared = msgspec.structs.replace(gpt, job=msgspec.structs.replace(gpt.job, runtime=runtime))
    with faulty(wrong_gradient):
        trained(prepared, tmp_path / "run", crew=crew)
    assert read_fingerprints(tmp_path / "run")[1].accelerators == dict.fromkeys(ON_ACCELERATOR, "checked:0")
    assert audit_run(tmp_path / "run", WRONG_STEP, other).holds
    for fleet in (None, other):
        (finding,) = audit_run(tmp_path / "run", STEPS, fleet).findings
        assert finding.workers == (WRONG,)


def test_audits_in_the_background_are_drawn_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    def after(script: str, share: float, steps: Sequence[int], *, waits: bool) -> list[str]:
        notes.clear()
        monkeypatch.setattr(audit, "audit_command", lambda run, step: ("sh", "-c", script, "sh", str(step)))
        with BackgroundAudits(tmp_path, share, notes.append) as audits:
            for step in steps:
                audits.saved(step)
            if waits and audits.working is not None:
                audits.working.join(60)
        return list(notes)

    assert after("echo step $1: fine", 1.0, [2], waits=True) == ["audit: step 2: fine"]
    assert after("echo error: no data; exit 2", 1.0, [2], waits=True) == ["audit: no data"]
    assert after("echo step $1: fine", 0.0, [2, 4], waits=True) == []
    assert after("exec sleep 600", 1.0, [2, 4], waits=False) == [], "it is ended with the run"


class WithIdle(ThreadCrew, frozen=True):
    """Two devices have nothing to do; they may be of no plan."""

    def idle(self, like: Collection[str]) -> list[str]:
        assert set(like) == {"d0", "d1", "d2"}
        return ["spare-0", "spare-1"]


def test_idle_devices_compute_steps_again(honest: Path) -> None:
    backend = WithIdle(accelerators=defaultdict(lambda: "cpu"))
    holders = DataHolders(backend.asks(Stop()), RunFolder(honest).job().data, (), heldout=False)
    notes: list[str] = []
    found = audit_run(honest, STEPS, note=notes.append, idle=IdleDevices(backend, holders))
    assert found.holds and found.devices == ("d0", "d1", "d2")
    assert notes == ["computing steps 3 to 4 again from the checkpoint of step 2, on spare-0, spare-1"]
    assert "spare-0" in holders.described, "its data are compared with those of the run"
    with pytest.raises(UserError, match="no device is idle"):
        audit_run(honest, STEPS, idle=IdleDevices(threads(), holders))


def test_audits_on_idle_devices_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine computes again what they could not, or found wrong: one of them may be the one that is wrong."""
    monkeypatch.setattr(audit, "audit_command", lambda run, step: ("echo", f"step {step}: here"))
    fine = Audited(run="", step=2, after=0, compared=5, devices=("a",), missing=())
    finding = StepFinding(workers=("a",), nodes=("gradients",))
    wrong = msgspec.structs.replace(fine, wrong_step=2, findings=(finding,))

    def said(found: Audited | UserError) -> list[str]:
        notes: list[str] = []

        def elsewhere(step: int, note: Callable[[str], None], stop: Stop) -> Audited:
            if isinstance(found, UserError):
                raise found
            return found

        with BackgroundAudits(tmp_path, 1.0, notes.append, elsewhere) as audits:
            audits.saved(2)
            assert audits.working is not None
            audits.working.join(60)
        return notes

    assert said(fine) == ["audit: steps 1 to 2: as computed again, 5 digests of a"]
    assert said(wrong) == ["audit: step 2: a computed wrong: gradients", "audit: step 2: here"]
    assert said(UserError("audit: no device is idle")) == [
        "audit: no device is idle: on this machine",
        "audit: step 2: here",
    ]


def test_steps_under_different_plans_are_compared_one_after_the_other(honest: Path, tmp_path: Path) -> None:
    """Those of an earlier plan first: a fault under it is not laid at the door of a later one's devices."""
    changed = tmp_path / "run"
    shutil.copytree(honest, changed)
    shutil.rmtree(changed / "checkpoints")
    path = changed / FINGERPRINTS
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    at = next(n for n, line in enumerate(lines) if json.loads(line).get("step") == 3)
    again = {**first, "step": 2, "plan": {**first["plan"], "planner": "another"}}
    path.write_text("\n".join([*lines[:at], json.dumps(again), *lines[at:]]) + "\n")
    found = audit_run(changed, 4)
    assert found.holds and found.after == 0 and found.compared == 4 * 23 + 2 * 3

    wrong = json.loads(lines[1])
    assert wrong["step"] == 1
    wrong["digests"]["gradients"] = "0" * 32
    path.write_text("\n".join([lines[0], json.dumps(wrong), *lines[2:at], json.dumps(again), *lines[at:]]) + "\n")
    found = audit_run(changed, 4)
    assert found.wrong_step == 1 and [finding.workers for finding in found.findings] == [(wrong["worker"],)]

    path.write_text("\n".join(line for line in lines if json.loads(line)["step"] != 2) + "\n")
    assert audit_run(changed, 4).missing == ("d0", "d1", "d2"), "a step of which every report is gone"


def test_an_audit_that_is_interrupted_says_so(honest: Path) -> None:
    stop = Stop()
    stop.request()
    with pytest.raises(Interrupted):
        audit_run(honest, 2, stop=stop)


def test_a_run_whose_rounding_is_not_torchs_is_refused(honest: Path) -> None:
    folder = RunFolder(honest)
    devices = folder.fleet().devices
    fleet = msgspec.structs.replace(
        folder.fleet(), devices=(*devices[:-1], msgspec.structs.replace(devices[-1], engine="jax"))
    )
    with pytest.raises(UserError, match=r"audit: engine: got jax .* its rounding is each device's own"):
        check_can_audit(folder.job(), folder.plan(), fleet, 0)


def test_what_no_honest_device_reports_is_ignored(honest: Path, tmp_path: Path) -> None:
    plan, one = RunFolder(honest).plan(), "0" * 32
    log = FingerprintLog(tmp_path, Fingerprinting(key=bytes(32)), steps=5)
    log.begin(0, plan)
    reported = [
        StepFingerprint(step=step, digests={name: one})
        for step, name in ((2, "sent forward 1"), (2, "gradients"), (1, "gradients"), (2, "state"), (2, "state"))
    ]
    log.add("d0", [*reported, StepFingerprint(step=6, digests={"gradients": one})])
    log.add("d0", [StepFingerprint(step=3, digests={"sent forward 9": one, "anything": one, "gradients": one})])
    log.add("stranger", [StepFingerprint(step=3, digests={"gradients": one})])
    found = read_fingerprints(tmp_path)
    assert {step: at.workers for step, at in found.items()} == {
        2: {"d0": {"sent forward 1": one, "state": one}},
        3: {"d0": {"gradients": one}},
    }


@pytest.mark.parametrize("leaves", [False, True])
def test_a_step_has_as_many_names_as_the_plan_has_nodes(honest: Path, tmp_path: Path, leaves: bool) -> None:
    """Whatever a device calls them: the file has not a line's worth of others. An audit has leaves, of these nodes."""
    plan, one = RunFolder(honest).plan(), "0" * 32
    log = FingerprintLog(tmp_path, Fingerprinting(key=bytes(32), leaves=leaves), steps=5, leaves=10)
    log.begin(0, plan)
    others = ["sent forward 01", "sent forward \u0661", "sent  forward 1", "sent shared 99999999999", "x" * 500]
    others += [f"gradients/{n:0490}" for n in range(1000)] if not leaves else [f"g/{n}" for n in range(1000)]
    known = ["sent forward 1", "gradients", *(["gradients/0 a.weight"] if leaves else [])]
    log.add("d0", [StepFingerprint(step=1, digests=dict.fromkeys([*others, *known], one))])
    assert set(read_fingerprints(tmp_path)[1].workers["d0"]) == set(known)


def test_an_audit_keeps_no_more_leaves_than_the_graph_has(honest: Path, tmp_path: Path) -> None:
    log = FingerprintLog(tmp_path, Fingerprinting(key=bytes(32), leaves=True), steps=5, leaves=10)
    log.begin(0, RunFolder(honest).plan())
    log.add("d0", [StepFingerprint(step=1, digests={f"gradients/{n:0490}": "0" * 32 for n in range(1000)})])
    assert not read_fingerprints(tmp_path)


def command(*arguments: object) -> int:
    with mock.patch.object(sys, "argv", ["isthmus", "audit", *map(str, arguments)]), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command(honest: Path, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(honest, "--step", 3, "--fleet", other) == 0
    said = capsys.readouterr()
    assert "step 3: as computed again, 23 digests of d0, d1, d2" in said.out
    assert "computing step 3 again from the checkpoint of step 2, on d0, d1" in said.err
    assert command(honest, "--step", 3, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["holds"] and document["wrong_step"] is None and document["after"] == 2
    assert command(honest, "--step", 9) == 2
    assert "--step: got 9, expected a step of which something was reported: 1 to 4" in capsys.readouterr().err
