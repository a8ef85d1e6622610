"""What is written to connections while a run goes on: devices in threads, every frame of all of them recorded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from isthmus.cost import build_plan
from isthmus.data import DataSpec, SampleOrder, load_dataset
from isthmus.data.dataset import evaluation_rows
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.graph import Flow, cuts
from isthmus.job import Job, PlanConfig, prepare
from isthmus.plans.plan import worker_id
from isthmus.runtime.coordinator.backend import DevicesAtWork, LocalBackend, RunRequest
from isthmus.runtime.device.device import DeviceWorker
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.device_process import worker_ids
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.transport import channel as channel_module
from isthmus.runtime.transport.acceptor import Acceptor
from isthmus.runtime.transport.channel import PREFIX, SocketChannel, chunks, frame
from isthmus.runtime.transport.listener import Listener

from .jobs import fleet_of, job_of, plain_run
from .joined_loop import Plain

FIRST_CLASS, CLASSES, FEATURES = 100, 200, 8


class _Working(DevicesAtWork):
    def starting(self, device: str) -> bool:
        return True


class ThreadCrew(LocalBackend, frozen=True, kw_only=True):
    """Devices in threads of this process."""

    @contextlib.contextmanager
    def at_work(self, call: RunRequest, acceptor: Acceptor) -> Generator[DevicesAtWork]:
        listener = Listener(self.host, timeout_s=call.timeout_s)
        listener.start(acceptor.on_connection)

        def work(site: Endpoint) -> None:
            DeviceWorker((self.host, listener.port), site, call.run, call.timeout_s).work()

        sites = [site for name in call.devices for site in worker_ids(Endpoint(device=name), call.stages.get(name, 1))]
        threads = [threading.Thread(target=work, args=(site,), daemon=True) for site in sites]
        for thread in threads:
            thread.start()
        try:
            yield _Working()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
        finally:
            listener.close()


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
    """To whom every frame goes that this process sends from now on, and its bytes but for the lengths in front."""
    found: list[tuple[str, bytes]] = []
    send = SocketChannel.send
    monkeypatch.setattr(channel_module, "COMPRESSED_HEADER_BYTES", 1 << 32)

    def record(self: SocketChannel, message: AnyMessage, payload: Sequence[memoryview] = ()) -> int:
        found.append((self.other, b"".join(chunks(frame(message, payload)))[PREFIX.size :]))
        return send(self, message, payload)

    monkeypatch.setattr(SocketChannel, "send", record)
    return found


def micro_batches_of_labels(job: Job) -> list[bytes]:
    """Of training and of evaluations, as they would travel."""
    train, heldout = (load_dataset(job.data, split) for split in ("train", "heldout"))
    size, order = job.micro_batch_size, SampleOrder(len(train), job.training.seed, job.training.shuffle)
    used = [(train, order.indices(start, size)) for start in range(0, job.training.steps * 8, size)]
    rows = evaluation_rows(heldout, job.training.eval_samples)
    used += [(heldout, rows[start : start + size]) for start in range(0, len(rows), size)]
    return [data.batch(indices, ["labels"])["labels"].numpy().tobytes() for data, indices in used]


@pytest.mark.parametrize("labels_stay", [True, False])
def test_no_sample_leaves_and_labels_do_only_where_the_job_lets_them(
    labels_stay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    pixels = draw.standard_normal((40, FEATURES), dtype=np.float32)
    labels = draw.integers(FIRST_CLASS, CLASSES, 40)
    np.savez(tmp_path / "samples.npz", pixel_values=pixels, labels=labels)
    spec = DataSpec(kind="npz", options={"path": str(tmp_path / "samples.npz"), "holdout": 0.2})
    mlp: dict[str, object] = {"features": FEATURES, "width": 8, "layers": 3, "classes": CLASSES}
    job = job_of("mlp", mlp, spec, steps=6, eval_every=2, eval_samples=8, save_every=2)
    holders = ("d0", "d2") if labels_stay else ("d0",)
    job = msgspec.structs.replace(job, plan=PlanConfig(data_holder=holders, labels_stay=labels_stay))
    prepared, fleet = prepare(job), fleet_of(3)
    problem = prepared.problem(fleet)
    legal = [cut.position for cut in cuts(Flow(prepared.captured.train, columns_first=True))]
    boundaries = [legal[len(legal) // 3], problem.last_start or legal[-1]]
    plan = build_plan(problem, fleet.names, boundaries, planner="test")
    frames, losses = recorded(monkeypatch), list[float | None]()
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    outcome = run_plan(
        prepared, plan, fleet, tmp_path / "run", RunOptions(emulate=False, backend=ThreadCrew()), watcher
    )
    assert outcome.outcome == "done", outcome.reason
    sent = b"".join(told for _, told in frames)
    assert len(sent) > 10_000, "the recorder sees something"
    assert not [row for row in pixels if row.tobytes() in sent], "no raw sample"
    # Between holders labels may travel: both have them.
    away = b"".join(told for to, told in frames if not labels_stay or to not in ("device 'd0'", "device 'd2'"))
    assert len(away) > 10_000
    found = [pair for pair in micro_batches_of_labels(job) if pair in away]
    assert (not found) is labels_stay, f"{len(found)} micro-batches' labels were sent"
    fingerprints = [load_dataset(spec, split).fingerprint.encode() for split in ("train", "heldout")]
    assert not [f for f in fingerprints if f in sent or bytes.fromhex(f.decode()) in sent]
    assert losses == pytest.approx(plain_run(job, prepared)[1], rel=1e-6)


@pytest.mark.parametrize("labels_stay", [True, False])
def test_of_holders_with_their_own_files_nothing_leaves_that_should_stay(
    labels_stay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs the first stage, and where labels stay the last one too, for a third device that has no data."""
    draw, pixels, own = np.random.default_rng(0), list[np.ndarray](), dict[str, dict[str, object]]()
    for name, count in (("d0", 40), ("d1", 20)):
        pixels.append(draw.standard_normal((count, FEATURES), dtype=np.float32))
        labels = draw.integers(FIRST_CLASS, CLASSES, count)
        np.savez(tmp_path / f"{name}.npz", pixel_values=pixels[-1], labels=labels)
        own[name] = {"path": str(tmp_path / f"{name}.npz")}
    spec = DataSpec(kind="npz", options={"path": "none.npz", "holdout": 0.2}, of=own)
    mlp: dict[str, object] = {"features": FEATURES, "width": 8, "layers": 3, "classes": CLASSES}
    job = job_of("mlp", mlp, spec, steps=6, eval_every=2, eval_samples=8, save_every=2)
    constraints = PlanConfig(data_holder=("d0", "d1"), holders_data="own", labels_stay=labels_stay)
    job = msgspec.structs.replace(job, plan=constraints)
    prepared, fleet = prepare(job), fleet_of(3)
    problem = prepared.problem(fleet)
    legal = [cut.position for cut in cuts(Flow(prepared.captured.train, columns_first=True))]
    last = problem.last_start or legal[-1]
    order = ["d0", "d2", "d0"] if labels_stay else ["d0", "d2"]
    plan = build_plan(problem, order, [legal[len(legal) // 3], last][: len(order) - 1], planner="test")
    frames, losses = recorded(monkeypatch), list[float | None]()
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    outcome = run_plan(
        prepared, plan, fleet, tmp_path / "run", RunOptions(emulate=False, backend=ThreadCrew()), watcher
    )
    assert outcome.outcome == "done", outcome.reason
    sent, plain = b"".join(told for _, told in frames), Plain(prepared)
    assert len(sent) > 10_000, "the recorder sees something"
    assert not [row for row in np.concatenate(pixels) if row.tobytes() in sent], "no raw sample, to nobody"
    for holder, labels in plain.labels(job.training.steps).items():
        inside = f"device {worker_id(holder, 1)!r}"  # what a holder's stages send each other does not leave it
        kept, away = (b"".join(told for to, told in frames if (to == inside) is here) for here in (True, False))
        assert len(labels) > 5 and len(away) > 10_000
        assert all((each in kept) is labels_stay for each in labels)
        assert all((each in away) is not labels_stay for each in labels), f"labels of {holder}"
    assert losses == pytest.approx([plain.step(step) for step in range(job.training.steps)], rel=1e-6)
