"""Checkpoints whose parts devices write to the store and read from there: the same bytes, complete or absent. What a
device says that it wrote is looked at."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.api.folder import RunFolder
from isthmus.api.stored_run import documents_of, local_copy
from isthmus.cost import build_plan
from isthmus.errors import UserError
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Fleet
from isthmus.job import Prepared, prepare
from isthmus.protocol.run_messages import Item, ItemReported, WrittenPart
from isthmus.runtime.coordinator.backend import LocalBackend
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.runtime.coordinator.stored_parts import StoredParts, written_headers
from isthmus.runtime.device import part_writer
from isthmus.runtime.device.part_writer import PartWriter, write_part
from isthmus.runtime.messages.assignment import StorePlace
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.stores import Owner, Store, StoreConfig, StoreFile, Uploader, commits_in, commits_of, newest_first
from isthmus.training.checkpoint import (
    checkpoint_files,
    latest_checkpoint,
    newest_whole_checkpoint,
    read_manifest,
    read_tensors,
)
from isthmus.training.optim import OptimizerConfig
from isthmus.training.snapshot import Snapshot, snapshot
from isthmus.training.stored import save_tensors
from tests.runtime.commands import devices_of, wait_until
from tests.runtime.jobs import DIGITS, fleet_of, job_of, random_cut

from .s3_server import Gate

ADAMW = (OptimizerConfig(name="adamw", lr=0.01),)
JOB = msgspec.structs.replace(job_of("mlp", {"layers": 3}, DIGITS, steps=6, save_every=2), optimizer=ADAMW)
EVERYWHERE = ("s3://bucket", "memory://", "file:///")
"""URLs that a device's owner may allow."""


class Ran:
    """A run on processes of this machine, whose folder is uploaded unless it is not to be."""

    def __init__(self, folder: Path, url: str, stages: int = 2, *, allowed: int = 9, uploads: bool = True) -> None:
        """The first `allowed` devices write their parts to the store, if it has a `url`."""
        self.folder, self.said = RunFolder(folder), list[str]()
        self._url, self._uploads = url, uploads
        self.uploads_until = 1 << 20
        """Later checkpoints are not uploaded."""
        self._prepared: Prepared = prepare(JOB)
        self._fleet: Fleet = fleet_of(stages)
        boundaries = random_cut(self._prepared, stages, 3)
        problem = self._prepared.problem(self._fleet)
        self._plan = build_plan(problem, self._fleet.names, boundaries, planner="test")
        names = self._fleet.names[:allowed]
        self._places = {name: ProcessPlace(checkpoints_to=EVERYWHERE) for name in names}

    def train(self, resume_from: Path | None = None, saved: Callable[[int], object] = lambda step: None) -> Outcome:
        if not self.folder.begun:
            self.folder.begin(JOB, self._fleet, self._plan, 0)
        owner, config = Owner(run="r", session="s"), StoreConfig(url=self._url or "memory://nowhere")
        uploader = Uploader(Store(config.url), self.folder.path, owner, documents_of, config)
        if self._uploads and self._url:
            uploader.start()

        def on_saved(step: int, directory: Path) -> None:
            if step <= self.uploads_until:
                uploader.committed(directory.relative_to(self.folder.path).as_posix())
            saved(step)

        options = RunOptions(
            emulate=False,
            backend=LocalBackend(places=self._places),
            store=self._url,
            resume_from=resume_from,
        )
        watcher = Watcher(saved=on_saved, noted=self.said.append)
        try:
            return run_plan(self._prepared, self._plan, self._fleet, self.folder.path, options, watcher)
        finally:
            if self._uploads and self._url:
                assert uploader.close(120), uploader.failure

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return read_tensors(latest_checkpoint(self.folder.checkpoints))

    @property
    def here(self) -> list[str]:
        """The names of the newest checkpoint's files that are in the folder."""
        return sorted(path.name for path in latest_checkpoint(self.folder.checkpoints).iterdir())


@pytest.fixture(scope="module")
def plain(s3: Gate, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run without a store."""
    ran = Ran(tmp_path_factory.mktemp("plain") / "run", "")
    assert ran.train().outcome == "done"
    return ran


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


def parts_of(url: str) -> dict[int, list[str]]:
    """Names of the files of safetensors in the store, by step."""
    found: dict[int, list[str]] = {}
    for name in Store(url).names():
        folder, _, file = name.rpartition("/")
        if file.endswith(".safetensors"):
            found.setdefault(int(folder[-6:]), []).append(file)
    return found


def test_parts_are_the_same_bytes_whoever_writes_them_and_none_goes_to_the_coordinator(
    s3: Gate, plain: Ran, tmp_path: Path
) -> None:
    url = f"s3://bucket/{tmp_path.name}"
    ran = Ran(tmp_path / "run", url)
    s3.served.clear()
    outcome = ran.train()
    assert outcome.outcome == "done", (outcome, ran.said)
    assert ran.here == ["manifest.json", "rest.safetensors"], "and no part of a device"
    wrote = [path for method, path, _ in s3.served if method == "PUT" and "/stage-" in path]
    assert len(wrote) == len(set(wrote)) == 6, "each part once"
    at = latest_checkpoint(ran.folder.checkpoints)
    files = {name.partition(".")[0]: name for name in read_manifest(at).files}
    expected = latest_checkpoint(plain.folder.checkpoints)
    for part in ("stage-0", "stage-1"):
        assert (
            Store(url).read(f"checkpoints/{at.name}/{files[part]}") == (expected / f"{part}.safetensors").read_bytes()
        )
    assert_same(ran.tensors, plain.tensors)
    assert not [line for line in ran.said if "checkpoint" in line]


def test_devices_that_may_not_write_send_their_parts_as_before(plain: Ran, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    ran = Ran(tmp_path / "run", url, allowed=1)
    outcome = ran.train()
    assert outcome.outcome == "done", (outcome, ran.said)
    assert ran.here == ["manifest.json", "rest.safetensors", "stage-1.safetensors"]
    assert [name.count(".") for name in sorted(parts_of(url)[6])] == [1, 2, 1], "of the first device alone by itself"
    assert_same(ran.tensors, plain.tensors)


@pytest.mark.parametrize(("store", "stages"), [("s3://bucket", 3), ("file://", 2)])
def test_on_another_machine_devices_read_their_ranges_also_of_another_cut(
    s3: Gate, plain: Ran, tmp_path: Path, capfd: pytest.CaptureFixture[str], store: str, stages: int
) -> None:
    """Killed after its second checkpoint; what its machine had is lost."""
    url = f"{store}{tmp_path}/store"

    def killed(step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Ran(tmp_path / "lost", url).train(saved=killed)
    with local_copy(url) as found:
        shutil.copytree(found, tmp_path / "run")
    at = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert read_manifest(at).step == 4
    assert sorted(path.name for path in at.iterdir()) == ["manifest.json", "rest.safetensors"]
    stored = [t for t in checkpoint_files(at).values() if t.store is not None]
    s3.served.clear()
    again = Ran(tmp_path / "run", url, stages)
    assert again.train(resume_from=at).outcome == "done"
    assert_same(again.tensors, plain.tensors)
    said = capfd.readouterr().err + "".join(again.said)
    assert "come from the coordinator" not in said
    got = sum(size for _, path, size in s3.served if "step-000004/stage-" in path)
    assert store == "file://" or got == sum(t.nbytes for t in stored), (
        "each tensor once, by the device that needs it, and no header"
    )


def test_what_a_device_cannot_write_comes_to_the_coordinator_with_the_reason(plain: Ran, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "checkpoints").write_text("a file where a folder is to be")
    ran = Ran(tmp_path / "run", f"file://{tmp_path}/store", uploads=False)
    assert ran.train().outcome == "done"
    assert {"stage-0.safetensors", "stage-1.safetensors"} <= set(ran.here)
    assert any(
        line.startswith("d1: its part of the checkpoint goes to the coordinator: store file:") for line in ran.said
    )
    assert_same(ran.tensors, plain.tensors)


def test_who_wrote_nothing_is_named_and_the_checkpoint_is_made_again(plain: Ran, tmp_path: Path) -> None:
    """Each process has a `memory://` of its own."""
    ran, steps = Ran(tmp_path / "run", f"memory://{tmp_path.name}", uploads=False), list[int]()
    assert ran.train(saved=steps.append).outcome == "done"
    given_up = [line for line in ran.said if line.startswith("the checkpoint after step 2 is not kept: device 'd")]
    assert len(given_up) == 1 and "which the store has not" in given_up[0]
    assert 2 < steps[0] <= 6 and steps[-1] == 6, "the next one is of the steps that were leased by then"
    assert {"stage-0.safetensors", "stage-1.safetensors"} <= set(ran.here)
    assert_same(ran.tensors, plain.tensors)


@pytest.mark.long
def test_a_device_that_is_killed_while_it_writes_costs_no_checkpoint(s3: Gate, plain: Ran, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}"
    first = Ran(tmp_path / "run", url)

    def saved(step: int) -> None:
        wait_until(lambda: len(commits_in(Store(url).names())) == step // 2)
        s3.hold("/step-000004/stage-1.")

    ended: list[Outcome] = []
    running = threading.Thread(target=lambda: ended.append(first.train(saved=saved)), daemon=True)
    running.start()
    wait_until(s3.reached.is_set)
    wait_until(lambda: 4 in parts_of(url))
    os.kill(devices_of(os.getpid())["d1"], signal.SIGKILL)
    running.join(120)
    s3.open()
    assert [outcome.outcome for outcome in ended] == ["lost"]
    assert [newest_first(commits_in(Store(url).names()))] == [["checkpoints/step-000002"]]
    _goes_on(tmp_path, url, plain, step=2)


def test_a_coordinator_that_is_killed_before_the_manifest_costs_no_checkpoint(plain: Ran, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"

    def killed(step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    lost = Ran(tmp_path / "run", url)
    lost.uploads_until = 2
    with pytest.raises(KeyboardInterrupt):
        lost.train(saved=killed)
    assert len(parts_of(url)[4]) == 2 and [*commits_in(Store(url).names())] == ["checkpoints/step-000002"]
    _goes_on(tmp_path, url, plain, step=2)


def _goes_on(tmp_path: Path, url: str, plain: Ran, *, step: int) -> None:
    """On another machine, from this step; in the end nothing is left but complete checkpoints."""
    with local_copy(url) as found:
        shutil.copytree(found, tmp_path / "again")
    at = newest_whole_checkpoint(tmp_path / "again" / "checkpoints", pytest.fail)
    assert at is not None and read_manifest(at).step == step
    again = Ran(tmp_path / "again", url)
    assert again.train(resume_from=at).outcome == "done"
    assert_same(again.tensors, plain.tensors)
    names = Store(url).names()
    listed = {
        f"{commit}/{name}"
        for commit in commits_of(again.folder.path)
        for name in (*read_manifest(again.folder.path / commit).files, "manifest.json")
    }
    assert {name for name in names if name.startswith("checkpoints/")} == listed


STATE = {
    "w": torch.arange(12.0).reshape(3, 4).t(),
    "optimizer.w.step": torch.tensor(3.0),
    "half": torch.ones(5, dtype=torch.bfloat16),
}


def written(tmp_path: Path) -> tuple[StoredParts, WrittenPart]:
    parts = StoredParts(f"file://{tmp_path}/store")
    parts.begin()
    place = parts.place("replica-1-stage-0", "replica.1.")
    assert place is not None
    return parts, write_part(place, 4, snapshot(STATE))


def doubt(parts: StoredParts, part: WrittenPart) -> str:
    return parts.doubt(4, ("replica-1-stage-0", "replica.1."), part)


def test_a_part_that_is_there_is_believed(tmp_path: Path) -> None:
    parts, part = written(tmp_path)
    assert doubt(parts, part) == ""
    assert {h.name: h.shape for h in written_headers(part)} == {name: tuple(t.shape) for name, t in STATE.items()}
    path = tmp_path / "store" / part.file.file
    expected = {f"replica.1.{name}": t for name, t in STATE.items()}
    assert save_tensors(tmp_path / "same", expected) == part.sha256
    assert path.read_bytes() == (tmp_path / "same").read_bytes()


def test_what_is_not_as_a_device_says_is_said(tmp_path: Path) -> None:
    parts, part = written(tmp_path)
    file, path = part.file, tmp_path / "store" / part.file.file
    lies = {
        "expected file:": {"file": "checkpoints/step-000002/stage-0.safetensors"},
        "which is not what its tensors take": {"size": file.size + 1},
        "and the store has": {"version": "mtime 1"},
        "has other bytes": {"tensors": tuple(msgspec.structs.replace(t, sha256="0" * 64) for t in file.tensors)},
    }
    for words, change in lies.items():
        found = doubt(parts, msgspec.structs.replace(part, file=msgspec.structs.replace(file, **change)))
        assert words in found and "\n" not in found, (words, found)
    moved = tuple(msgspec.structs.replace(t, offset=t.offset + 1) for t in file.tensors)
    assert doubt(parts, msgspec.structs.replace(part, file=msgspec.structs.replace(file, tensors=moved)))
    whole = path.read_bytes()
    path.write_bytes(b" " * len(whole))
    there = StoreFile.found(file.model, file.file)
    assert there is not None
    altered = msgspec.structs.replace(file, version=there.version)
    assert "its header is not" in doubt(parts, msgspec.structs.replace(part, file=altered))
    path.unlink()
    assert "which the store has not" in doubt(parts, part)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/private", "stage-0.aa.safetensors"),
        ("s3://bucket/runs/../private", "stage-0.aa.safetensors"),
        ("s3://bucket/runs/first", "../../../stage-0.safetensors"),
        ("s3://bucket/runs/first", "job.json"),
    ],
)
def test_a_device_writes_nowhere_but_where_its_owner_allows(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "write_part", lambda *_: pytest.fail("it writes"))
    sent: list[Snapshot | None] = []
    writer = PartWriter(["s3://bucket/runs"], lambda done, taken: sent.append(taken))
    taken = snapshot(STATE)
    item = Item(index=0, kind="save", step=2, to_store=True)
    writer.report(ItemReported(item=0), item, StorePlace(url=url, name=name, prefix=""), taken)
    assert sent == [taken]


def test_reports_after_a_part_wait_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sent = threading.Event(), list[int]()

    def refused(*_: object) -> WrittenPart:
        opened.wait()
        raise UserError("no")

    monkeypatch.setattr(part_writer, "write_part", refused)
    writer = PartWriter(["s3://bucket/runs"], lambda done, taken: sent.append(done.item))
    place = StorePlace(url="s3://bucket/runs/first", name="stage-0.aa.safetensors", prefix="")
    for index in range(4):
        item = Item(index=index, kind="save" if index == 1 else "train", step=2, to_store=index == 1)
        writer.report(ItemReported(item=index), item, place, snapshot(STATE) if index == 1 else None)
    assert sent == [0]
    opened.set()
    wait_until(lambda: sent == [0, 1, 2, 3])
