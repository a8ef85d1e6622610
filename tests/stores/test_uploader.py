"""Uploads: complete or absent at every moment, pruned like the folder, retried, never in the way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.stores import Owner, RemoteStoreError, Store, StoreConfig, Uploader, commits_in, read_owner
from isthmus.stores import uploader as module

OWNER = Owner(run="r", session="s")
_NUMBERS = itertools.count()


class Slow(Store):
    """Calls `before` with each name that is written or removed; it may wait, or refuse."""

    def __init__(self) -> None:
        super().__init__(f"memory://uploads/{next(_NUMBERS)}")
        self.before: Callable[[str], None] = lambda name: None
        self.done: list[str] = []

    def write(self, name: str, data: bytes) -> None:
        self.before(name)
        super().write(name, data)
        self.done.append(name)

    def upload(self, local: Path, name: str) -> None:
        self.before(name)
        super().upload(local, name)
        self.done.append(name)

    def remove(self, names: object) -> None:
        for name in list(names):  # type: ignore[call-overload]
            self.before(name)
            super().remove([name])
            self.done.append(f"-{name}")


def checkpoint(run: Path, step: int, text: str = "", written: str = "") -> str:
    """In a run's folder, and of what a device has `written` to the store."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("stage-0.safetensors", "stage-1.safetensors", "manifest.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(f"{step} {name} {text}")
    (folder / "manifest.json").write_text(f'{{"files": {{"stage-0.safetensors": {{}}, "{written}": {{}}}}}}')
    return f"checkpoints/step-{step:06d}"


def removed(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:06d}"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def begun(store: Store, run: Path) -> Uploader:
    run.mkdir(exist_ok=True)
    (run / "job.json").write_text("{}")
    found = Uploader(
        store, run, OWNER, lambda folder: [folder / "job.json"], StoreConfig(url="memory://x", every="0.01 s")
    )
    found.start()
    return found


def steps(store: Store) -> list[int]:
    return [int(commit[-6:]) for commit in commits_in(store.names())]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(module, "MOST_WAIT_S", 0.004)


def test_documents_come_first_and_the_manifest_last(tmp_path: Path) -> None:
    store, run = Slow(), tmp_path / "run"
    uploader = begun(store, run)
    uploader.committed(checkpoint(run, 3))
    assert uploader.close(60)
    at = "checkpoints/step-000003"
    order = ["job.json", f"{at}/stage-0.safetensors", f"{at}/stage-1.safetensors", f"{at}/manifest.json"]
    assert store.done == order and store.read(f"{at}/stage-1.safetensors") == b"3 stage-1.safetensors "
    assert not (run / ".uploading").exists()


def test_at_every_moment_a_whole_checkpoint_is_there(tmp_path: Path) -> None:
    """A reader between any two calls finds the one before or the new one, also where a step is made again."""
    store, run = Slow(), tmp_path / "run"
    seen: list[list[int]] = []
    store.before = lambda name: seen.append(steps(store))
    uploader = begun(store, run)
    uploader.committed(checkpoint(run, 3))
    assert uploader.close(60)
    uploader = begun(store, run)
    uploader.committed(checkpoint(run, 6))
    assert uploader.close(60)
    removed(run, 3)
    uploader = begun(store, run)
    uploader.committed(checkpoint(run, 9))
    assert uploader.close(60)
    assert steps(store) == [6, 9], "what the folder has no more is removed"
    uploader = begun(store, run)
    uploader.committed(checkpoint(run, 9, "another line"))
    assert uploader.close(60)
    assert seen[-1] == [6] and steps(store) == [6, 9]
    assert store.read("checkpoints/step-000009/stage-0.safetensors") == b"9 stage-0.safetensors another line"
    first = next(n for n, found in enumerate(seen) if found)
    assert all(seen[first:])


def test_slow_uploads_hold_their_files_and_skip_to_the_newest(tmp_path: Path) -> None:
    store, run = Slow(), tmp_path / "run"
    reached, go = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        if name.endswith("step-000001/stage-1.safetensors"):
            reached.set()
            go.wait(60)

    store.before = wait
    uploader = begun(store, run)
    uploader.committed(checkpoint(run, 1))
    assert reached.wait(60)
    for step in (2, 3, 4):
        uploader.committed(checkpoint(run, step))
        removed(run, step - 1)  # the run removes its own meanwhile
    go.set()
    assert uploader.close(60)
    assert "checkpoints/step-000001/manifest.json" in store.done and steps(store) == [4]
    assert not any("step-000002" in name or "step-000003" in name for name in store.done)


def test_failures_are_named_once_and_retried(tmp_path: Path) -> None:
    store, run, left = Slow(), tmp_path / "run", iter(range(5))

    def refuse(name: str) -> None:
        if name.endswith("stage-1.safetensors") and next(left, None) is not None:
            raise RemoteStoreError("store x: no route")

    store.before = refuse
    uploader = begun(store, run)
    uploader.committed(checkpoint(run, 3))
    assert uploader.close(60) and steps(store) == [3]
    assert uploader.notes() == [
        "store x: no route; the run goes on, next attempt in 0.001 s",
        f"store {store.url}: uploads go on",
    ]
    assert uploader.notes() == []


def test_the_end_waits_no_longer_than_it_says(tmp_path: Path) -> None:
    store, run, go = Slow(), tmp_path / "run", threading.Event()
    store.before = lambda name: go.wait(60) and None
    uploader = begun(store, run)
    uploader.committed(checkpoint(run, 3))
    assert not uploader.close(0.01) and steps(store) == []
    go.set()


def test_a_session_that_was_cut_off_uploads_nothing_more(tmp_path: Path) -> None:
    store, run = Slow(), tmp_path / "run"
    store.write("store.json", b'{"run":"r","session":"another"}')
    uploader = begun(store, run)
    uploader.committed(checkpoint(run, 3))
    assert not uploader.close(60)
    assert steps(store) == [] and "job.json" not in store.names()
    assert uploader.notes() == [
        f"store {store.url}: another session uploads to it since: this one uploads nothing more"
    ]
    assert read_owner(store) == Owner(run="r", session="another")


def test_documents_are_uploaded_when_they_change(tmp_path: Path) -> None:
    store, run = Slow(), tmp_path / "run"
    changed = threading.Event()
    store.before = lambda name: changed.set() if (run / "job.json").read_text() == "[]" else None
    uploader = begun(store, run)
    (run / "job.json").write_text("[]")
    assert changed.wait(60), "by time, without a checkpoint"
    assert uploader.close(60)
    assert store.read("job.json") == b"[]" and store.done.count("job.json") <= 2


def test_what_devices_wrote_stays_and_what_no_manifest_names_goes(tmp_path: Path) -> None:
    """Of a save that was given up, in its own folder and in that of the same step."""
    store, run = Slow(), tmp_path / "run"
    at, before = "checkpoints/step-000003", "checkpoints/step-000001"
    for name in (f"{at}/stage-2.aa.safetensors", f"{at}/stage-2.bb.safetensors", f"{before}/stage-2.cc.safetensors"):
        Store(store.url).write(name, b"written by a device")
    later = "checkpoints/step-000005/stage-2.aa.safetensors"
    Store(store.url).write(later, b"of a save under way")
    uploader = begun(store, run)
    uploader.committed(checkpoint(run, 3, written="stage-2.aa.safetensors"))
    assert uploader.close(60), uploader.failure
    assert [name for name in store.names() if name.startswith(at)] == [
        f"{at}/manifest.json",
        f"{at}/stage-0.safetensors",
        f"{at}/stage-1.safetensors",
        f"{at}/stage-2.aa.safetensors",
    ]
    assert not [name for name in store.names() if name.startswith(before)] and later in store.names()
