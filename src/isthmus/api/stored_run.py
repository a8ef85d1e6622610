"""A run and its store: uploads while it works, a folder made from the store on another machine."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import msgspec

from isthmus.api.folder import AGENTS_LOG, PROBED, RunFolder
from isthmus.api.run_entries import SPANS
from isthmus.errors import UserError
from isthmus.federated.server import Commits
from isthmus.federated.states import needs_states, pack_states, packed_beside
from isthmus.overrides import overridden_struct
from isthmus.run_files import CHECKPOINTS, JOB, MANIFEST, PACKED, ROUNDS, STATES_FOLDER, read_json
from isthmus.runtime.coordinator.recovery_record import RECORD
from isthmus.stores import (
    OWNER,
    Owner,
    RemoteStoreError,
    Store,
    StoreConfig,
    Uploader,
    commits_in,
    commits_of,
    is_document,
    is_url,
    newest_first,
    number_of,
    read_owner,
)
from isthmus.trackers import ID_FILE
from isthmus.training.checkpoint import left_in_store, newest_whole_checkpoint
from isthmus.units import format_duration

Note = Callable[[str], None]
STAY = frozenset({RECORD, OWNER, SPANS})
"""Documents that are not uploaded: the first is secret, the last is in `trace.jsonl` when the run is over."""
PATTERNS = ("*.json", "*.jsonl", "*.png", ID_FILE, AGENTS_LOG, PROBED, "logs/*.log", "sessions/*/*")


def documents_of(folder: Path) -> list[Path]:
    """Return the files that are uploaded besides checkpoints and rounds, the job last: with it a store holds a run.
    Samples and keys stay."""
    found = {path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()}
    found = {path for path in found if path.name not in STAY}
    return sorted(found, key=lambda path: (path == folder / JOB, path)) if folder / JOB in found else []


class Uploads:
    """The uploads of a run, or of one that has no store: then nothing happens."""

    def __init__(self, uploader: Uploader | None = None) -> None:
        self._uploader = uploader

    @property
    def busy(self) -> bool:
        """Return whether a commit is being uploaded, or waits."""
        return self._uploader is not None and self._uploader.busy

    def committed(self, path: Path, run: Path, add: Callable[[Path], object] = lambda _: None) -> None:
        """A checkpoint or a round of the run's folder is complete. `add`: as of `Uploader.committed`."""
        if self._uploader is not None:
            self._uploader.committed(path.relative_to(run).as_posix(), add)

    def tell(self, note: Note) -> None:
        """Note the outcomes of uploads since the last call."""
        for text in self._uploader.notes() if self._uploader is not None else ():
            note(text)


class RoundUploads:
    """The uploads of a federated run: each round is uploaded once it is on disk. Where clients keep states, each that
    comes while no upload is under way, and the last one: all states go with it."""

    def __init__(self, uploads: Uploads, folder: Path) -> None:
        self.folder = folder
        self._uploads = uploads
        self._rounds = Commits(folder / ROUNDS)
        self._newest = self._rounds.newest_file()
        self._state_bytes: int | None = None

    def keeps_states(self, size_bytes: int) -> None:
        """Clients keep states of up to so many bytes, in the run's folder."""
        self._state_bytes, self._newest = size_bytes, None

    def look(self, note: Note, *, last: bool = False) -> None:
        """A round may have been committed; the places of its states are not filled again before the next one is."""
        newest, size_bytes = self._rounds.newest_file(), self._state_bytes
        if newest is not None and newest != self._newest and (last or size_bytes is None or not self._uploads.busy):
            self._newest = newest

            def add(held: Path) -> None:
                if size_bytes is not None:
                    pack_states(newest, self.folder / STATES_FOLDER, size_bytes, packed_beside(held))

            self._uploads.committed(newest, self.folder, add)
        self._uploads.tell(note)


def open_store(config: StoreConfig) -> Store:
    """RemoteStoreError."""
    return Store(config.url, config.options)


def store_in(overrides: Mapping[str, object]) -> StoreConfig | None:
    """The store that overrides of a job name. UserError."""
    given = {key: value for key, value in overrides.items() if key.partition(".")[0] == "store"}
    return overridden_struct(_Stored(), given, "job").store if given else None


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The field that every kind of job has."""

    store: StoreConfig | None = None


def chosen_folder(
    parent: Path, name: str, *, resume: bool, run: Path | None, store: StoreConfig | None, note: Note
) -> RunFolder:
    """Return the same as `RunFolder.chosen`. Where the run to resume is not on this machine, its folder is made from
    the store."""
    if store is None or not resume or _is_here(parent, name, run):
        return RunFolder.chosen(parent, name, resume=resume, run=run)
    if run is not None:
        RunFolder.empty(run)
    with _fetched(open_store(store), parent if run is None else run.absolute().parent, note) as found:
        folder = RunFolder.fresh(parent, name) if run is None else RunFolder(run)
        _install(found, folder.path)
    return folder


def _is_here(parent: Path, name: str, run: Path | None) -> bool:
    """Return whether the run to resume is on this machine."""
    if run is not None:
        return RunFolder(run).begun
    try:
        RunFolder.newest(parent, name)
    except UserError:
        return False
    return True


@contextlib.contextmanager
def uploaded(config: StoreConfig | None, folder: RunFolder, note: Note, *, resume: bool) -> Generator[Uploads]:
    """The run in this folder is uploaded meanwhile; the end waits for what is left. At the beginning a newer commit of
    the store is fetched. UserError for a store that cannot be used, or holds another run."""
    if config is None:
        yield Uploads()
        return
    store = open_store(config)
    names, before, here = store.names(), read_owner(store), _owner_of(folder.path)
    if JOB in names and not resume:
        raise UserError(f"store.url: {store.url}: holds a run already; resume it, or name another URL")
    if JOB in names and (before is None or here is None or before.run != here.run):
        what = "expected a URL of its own, or --run of an empty folder to go on from there"
        raise UserError(f"store.url: {store.url}: holds another run than {folder.path}, {what}")
    ours, theirs = commits_of(folder.path), commits_in(names)
    if JOB in names and _newest(theirs) > _newest(ours):
        with _fetched(store, folder.path.absolute().parent, note) as found:
            _install(found, folder.path)
    owner = Owner(run=here.run if here is not None else secrets.token_hex(8), session=secrets.token_hex(8))
    store.write(OWNER, msgspec.json.encode(owner))
    uploader = Uploader(store, folder.path, owner, documents_of, config)
    if ours and _newest(ours) > _newest(theirs) and not needs_states(folder.path / newest_first(ours)[0]):
        uploader.committed(newest_first(ours)[0])
    uploader.start()
    timeout_s = config.drain_s
    try:
        yield Uploads(uploader)
    except KeyboardInterrupt:  # a second Ctrl-C does not wait
        timeout_s = 0.0
        raise
    finally:
        if folder.begun:
            _drain(uploader, store, timeout_s, note)
        else:
            uploader.close(timeout_s)
            with contextlib.suppress(RemoteStoreError):
                store.remove([OWNER] if before is None else [])


def _drain(uploader: Uploader, store: Store, timeout_s: float, note: Note) -> None:
    """Wait for what is left, and say what became of it."""
    for text in uploader.notes():
        note(text)
    if timeout_s:
        note(f"uploading what is left to {store.url}, for {format_duration(timeout_s)} at most")
    complete = uploader.close(timeout_s)
    for text in uploader.notes():
        note(text)
    if complete:
        note(f"uploaded to {store.url}")
        return
    reason = uploader.failure or f"waited {format_duration(timeout_s)}"
    note(f"warning: not everything was uploaded to {store.url}: {reason}; the run folder has all")


def _newest(commits: Mapping[str, list[str]]) -> int:
    """The step or round; -1 where there is none."""
    return max(map(number_of, commits), default=-1)


def _owner_of(folder: Path) -> Owner | None:
    """None for a run that never had a store."""
    return read_json(folder / OWNER, Owner)


@contextlib.contextmanager
def local_copy(run: str | Path, note: Note = lambda _: None) -> Generator[Path]:
    """The folder of a run, which may be a URL: then what it goes on from, for as long as the block lasts. UserError."""
    if not is_url(str(run)):
        yield Path(run)
        return
    with _fetched(Store(str(run)), Path(tempfile.gettempdir()), note, states=False) as found:
        yield found


@contextlib.contextmanager
def _fetched(store: Store, beside: Path, note: Note, *, states: bool = True) -> Generator[Path]:
    """The store's run in a temporary folder: documents, and the newest commit that is whole, with newer ones that are
    not, and clients' `states`. What devices wrote there is read from there when it is wanted. UserError."""
    names = store.names()
    if JOB not in names:
        raise UserError(f"store {store.url}: holds no run (no {JOB})")
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".from-store-", dir=beside) as temporary:
        folder, commits = Path(temporary), commits_in(names)
        for commit in newest_first(commits):
            note(f"fetching {commit} from {store.url}")
            manifest = f"{commit}/{MANIFEST}"
            if manifest in commits[commit]:
                store.download(manifest, folder / manifest)
            stay = {f"{commit}/{name}" for name in left_in_store(folder / manifest, store.url)}
            for name in commits[commit]:
                if name not in (manifest, *stay) and (states or not name.endswith(PACKED)):
                    store.download(name, folder / name)
            if _is_whole(folder):
                break
        for name in filter(is_document, names):
            if name not in (RECORD, SPANS):
                store.download(name, folder / name)
        yield folder


def _is_whole(folder: Path) -> bool:
    """Return whether a run could go on from a commit here."""
    try:
        if (folder / ROUNDS).is_dir():
            return Commits(folder / ROUNDS).newest(needs_states=False) is not None
        return newest_whole_checkpoint(folder / CHECKPOINTS, lambda _: None) is not None
    except UserError:
        return False


def _install(found: Path, folder: Path) -> None:
    """Move a fetched run into its folder: what makes a checkpoint complete after its other files, the job last."""
    files = [path.relative_to(found) for path in found.rglob("*") if path.is_file()]
    for name in sorted(files, key=lambda name: (name == Path(JOB), name.name == MANIFEST, name.suffix != PACKED, name)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).replace(folder / name)
