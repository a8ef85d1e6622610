"""Uploads a run's folder to its store, in a thread: a run goes on at its own speed whatever becomes of its uploads.

A commit (a checkpoint, a round) is uploaded after the documents that belong to it, and its last file after all others:
it is in the store complete, or not at all. Its files are held by hard links meanwhile, as the run may remove its own.
Where uploads are slower than commits, the newest is uploaded next. Then older ones are removed: as many stay as in the
folder.

Each session writes its name into the store. A coordinator that finds another session there than its own was cut off,
and uploads nothing more.

The complete parts of a run, by the names of its files: in its folder and in its store alike.

    checkpoints/step-000040/stage-0.safetensors
    checkpoints/step-000040/stage-1.1f0c93ab.safetensors   written by its device, in no folder but the store
    checkpoints/step-000040/manifest.json            uploaded last, removed first
    rounds/round-000010.states                       what clients keep, if they do
    rounds/round-000010.safetensors                  with its own digest, uploaded last, removed first

A commit is what a run can go on from: a checkpoint, or a federated round.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from isthmus.errors import UserError
from isthmus.reading import parse_json
from isthmus.run_files import CHECKPOINTS, MANIFEST, PACKED, ROUNDS, write_json
from isthmus.stores.store import Store
from isthmus.units import parse_duration

_SECRET = re.compile(r"key|secret|token|passw|credential", re.IGNORECASE)


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run is kept besides its folder.

    >>> StoreConfig(url="s3://bucket/runs/first").drain_s
    600.0
    """

    url: str  # The place of this one run: `s3://bucket/runs/first`, `gs://`, `file://`, or another URL of fsspec.
    every: str = "60 s"
    """Documents that changed are uploaded so often; a checkpoint is uploaded as soon as it is complete."""
    drain: str = "10 min"  # How long the end of a run waits until everything is uploaded.
    options: dict[str, str | int | float | bool] = {}
    """Options of fsspec's file system, as `endpoint_url`. Keys come from the environment."""

    def __post_init__(self) -> None:
        if "://" not in self.url:
            raise ValueError(f"url: got {self.url!r}, expected a URL such as s3://bucket/runs/first")
        if urlsplit(self.url).password is not None:
            raise ValueError("url: got a password, expected it in the environment: jobs are uploaded and logged")
        for name in self.options:
            if _SECRET.search(name):
                raise ValueError(f"options.{name}: expected it in the environment: jobs are uploaded and logged")
        try:
            every_s, _ = self.every_s, self.drain_s
        except UserError as e:
            raise ValueError(str(e)) from None
        if every_s <= 0:
            raise ValueError(f"every: got {self.every!r}, expected a time above 0")

    @property
    def of_devices(self) -> str:
        """The URL for devices, which have options of their own; empty where the job has options."""
        return "" if self.options else self.url.rstrip("/")

    @property
    def every_s(self) -> float:
        return parse_duration(self.every, "every")

    @property
    def drain_s(self) -> float:
        return parse_duration(self.drain, "drain")


_CHECKPOINT = re.compile(rf"({CHECKPOINTS}/step-\d+)/([A-Za-z0-9][\w.-]*)")
_ROUND = re.compile(rf"({ROUNDS}/round-\d+)\.safetensors")
_STATES = re.compile(rf"({ROUNDS}/round-\d+){re.escape(PACKED)}")
_PART = re.compile(r"[A-Za-z0-9][\w.-]*")


def parts_of_commits(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each commit, the one that makes it complete last; also of incomplete commits.

    >>> parts_of_commits(["checkpoints/step-000002/manifest.json", "checkpoints/step-000002/rest.safetensors"])
    {'checkpoints/step-000002': ['checkpoints/step-000002/rest.safetensors', 'checkpoints/step-000002/manifest.json']}
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (name.endswith(f"/{MANIFEST}"), name)):
        if (part := _CHECKPOINT.fullmatch(name)) is not None:
            found.setdefault(part[1], []).append(name)
        elif _ROUND.fullmatch(name):
            found.setdefault(name, []).append(name)
        elif (part := _STATES.fullmatch(name)) is not None:
            found.setdefault(f"{part[1]}.safetensors", []).insert(0, name)
    return found


def commits_in(names: Iterable[str]) -> dict[str, list[str]]:
    """The complete ones of `parts_of_commits`."""
    return {
        commit: files
        for commit, files in parts_of_commits(names).items()
        if files[-1] in (commit, f"{commit}/{MANIFEST}")
    }


def number_of(commit: str) -> int:
    """The step or the round."""
    return int(re.findall(r"\d+", commit)[-1])


def newest_first(commits: Mapping[str, list[str]]) -> list[str]:
    return sorted(commits, key=number_of, reverse=True)


def is_document(name: str) -> bool:
    """Return whether a name in a store is of a file that may be written into a run's folder: no part of a commit, and
    nothing that leads out of the folder."""
    folder, _, _ = name.partition("/")
    return folder not in (CHECKPOINTS, ROUNDS) and all(_PART.fullmatch(part) for part in name.split("/"))


OWNER = "store.json"
HELD = ".uploading"  # folder of the links, in the run's folder
FIRST_WAIT_S, MOST_WAIT_S = 1.0, 60.0  # after a failure; doubled after each further one


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a store holds, and who uploads it."""

    run: str  # drawn when the run began
    session: str  # drawn by each session


def read_owner(store: Store) -> Owner | None:
    """None where no run ever was. RemoteStoreError."""
    found = store.read(OWNER)
    return None if found is None else parse_json(found, Owner, f"store {store.url}: {OWNER}")


def commits_of(folder: Path) -> dict[str, list[str]]:
    """The complete commits in a run's folder, each with its files."""
    files = (path for top in (CHECKPOINTS, ROUNDS) for path in (folder / top).rglob("*"))
    return commits_in(path.relative_to(folder).as_posix() for path in files)


class _Held(NamedTuple):
    """A commit whose files are held by links under a folder of its own."""

    commit: str
    folder: Path

    def release(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Uploader:
    """The uploads of one session. All methods but `close` return at once."""

    def __init__(
        self, store: Store, folder: Path, owner: Owner, documents: Callable[[Path], list[Path]], config: StoreConfig
    ) -> None:
        """`documents` lists those of the folder, in the order in which they are uploaded."""
        self._store, self._folder, self._owner = store, folder, owner
        self._documents, self._config = documents, config
        self._uploaded: dict[str, tuple[int, int]] = {}  # the time of its last change, and its size, of each document
        self._changed = threading.Condition()
        self._waiting: _Held | None = None  # to be uploaded next
        self._count = 0
        self._closing = self._over = self._uploading = False
        self._said: list[str] = []
        self._failure = ""
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        shutil.rmtree(folder / HELD, ignore_errors=True)  # of a session that was killed

    def start(self) -> None:
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Return whether a commit is being uploaded, or waits."""
        return self._uploading or self._waiting is not None

    def committed(self, commit: str, add: Callable[[Path], object] = lambda _: None) -> None:
        """This checkpoint or round is complete in the run's folder. `add` puts what else belongs to it beside the path
        that it is given."""
        self._count += 1
        held = _Held(commit, self._folder / HELD / str(self._count))
        try:
            (held.folder / commit).parent.mkdir(parents=True, exist_ok=True)
            add(held.folder / commit)
            _link(self._folder / commit, held.folder / commit)
        except OSError as e:
            self._say(f"store {self._store.url}: {commit} is not uploaded: {e.strerror or e}")
            return
        with self._changed:
            before, self._waiting = self._waiting, held
            self._changed.notify_all()
        if before is not None:
            before.release()

    def notes(self) -> list[str]:
        """Return the messages for people since the last call."""
        with self._changed:
            said, self._said = self._said, []
        return said

    def close(self, timeout_s: float) -> bool:
        """Upload what is left; whether that was done in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            return False
        shutil.rmtree(self._folder / HELD, ignore_errors=True)
        return not self._failure

    @property
    def failure(self) -> str:
        """The error of the last attempt; empty where it succeeded."""
        return self._failure

    def _work(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._over:
            with self._changed:
                held, closing = self._waiting, self._closing
                self._uploading, self._waiting = held is not None, None
            try:
                if not self._is_ours():
                    return
                self._upload(held)
            except Exception as e:  # whatever a library raises: a thread that ended would upload nothing more
                self._keep(held)
                self._failed(str(e), wait_s)
                self._wait(wait_s, lambda closing=closing: self._over or self._closing > closing)
                wait_s = min(2 * wait_s, MOST_WAIT_S)
                continue
            if self._failure:
                self._failure = ""
                self._say(f"store {self._store.url}: uploads go on")
            wait_s = FIRST_WAIT_S
            self._uploading = False
            with self._changed:
                if closing and self._waiting is None:
                    return
            self._wait(self._config.every_s, lambda: self._over or self._closing or self._waiting is not None)

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(until, seconds)

    def _keep(self, held: _Held | None) -> None:
        """For the next attempt, unless there is a newer one."""
        with self._changed:
            if self._waiting is None:
                self._waiting = held
                return
        if held is not None:
            held.release()

    def _failed(self, reason: str, wait_s: float) -> None:
        if reason != self._failure:
            self._failure = reason
            self._say(f"{reason}; the run goes on, next attempt in {wait_s:g} s")

    def _say(self, text: str) -> None:
        with self._changed:
            self._said.append(text)

    def _is_ours(self) -> bool:
        found = read_owner(self._store)
        if found is None or found == self._owner:
            return True
        self._failure = f"store {self._store.url}: another session uploads to it since"
        self._say(f"{self._failure}: this one uploads nothing more")
        return False

    def _upload(self, held: _Held | None) -> None:
        documents = self._documents(self._folder)
        if documents and not self._uploaded:
            write_json(self._folder / OWNER, self._owner)
        for path in documents:
            self._upload_document(path)
        if held is None:
            return
        there, files = self._store.names(), commits_of(held.folder)[held.commit]
        written = _files_of_manifest(held.folder / held.commit, held.commit).difference(files)  # by devices
        others = [name for name in parts_of_commits(there).get(held.commit, []) if name not in written]
        self._store.remove(reversed(others))  # of a line that was given up
        for name in files:
            self._store.upload(held.folder / name, name)
        self._prune(there, held.commit)
        held.release()

    def _upload_document(self, path: Path) -> None:
        name, found = path.relative_to(self._folder).as_posix(), path.stat()
        state = (found.st_mtime_ns, found.st_size)
        if self._uploaded.get(name) != state:
            self._store.upload(path, name)
            self._uploaded[name] = state

    def _prune(self, there: list[str], newest: str) -> None:
        """Remove old commits, and parts. Of those no newer as many stay as the folder has, and those that it has."""
        here = commits_of(self._folder)
        complete = {commit for commit in commits_in(there) if number_of(commit) < number_of(newest)}
        stay = {*here, *sorted(complete, key=number_of, reverse=True)[: len(here) - 1]}
        for commit, files in parts_of_commits(there).items():
            if number_of(commit) < number_of(newest) and commit not in stay:
                self._store.remove(reversed(files))


class _Listing(msgspec.Struct):
    """The part of a checkpoint's manifest that an upload depends on."""

    files: dict[str, msgspec.Raw] = {}


def _files_of_manifest(folder: Path, commit: str) -> set[str]:
    """Names in the store of the files that a checkpoint has; none of a round."""
    if not (manifest := folder / MANIFEST).is_file():
        return set()
    return {f"{commit}/{name}" for name in parse_json(manifest.read_bytes(), _Listing, str(manifest)).files}


def _link(source: Path, target: Path) -> None:
    """A file, or a folder of files."""
    if source.is_dir():
        target.mkdir()
        for path in source.iterdir():
            _link(path, target / path.name)
        return
    try:
        os.link(source, target)
    except OSError:  # some file systems have no links
        shutil.copy2(source, target)
