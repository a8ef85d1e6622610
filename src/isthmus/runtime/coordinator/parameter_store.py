"""A run's variables, as far as its coordinator has them: a module's first values, a checkpoint's."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.job import Prepared
from isthmus.job.first_weights import FirstWeights, first_weights
from isthmus.protocol.draws import Draw, DrawnTensor, Draws
from isthmus.protocol.run_messages import FileTensor, PlaceWeights, WeightFile
from isthmus.stores import StoreFile
from isthmus.training.checkpoint import OPTIMIZER, check_base, digest_of, read_manifest, rest
from isthmus.training.draws import MOST_REPEATED
from isthmus.training.scaling import LOSS_SCALE, LossScale
from isthmus.training.snapshot import part_of
from isthmus.training.stored import Sent, StoredTensor, place_of
from isthmus.training.weights import resume


class ParameterStore:
    """A table of tensors: of those in files, where they lie.

    The module is built when something of it is wanted, and not before: of a large one that takes long, and a
    coordinator that was started again finds everything in its devices' memory."""

    def __init__(
        self,
        prepared: Prepared,
        written: frozenset[str],
        given: Mapping[str, Tensor] | None = None,
        noted: Callable[[str], None] = lambda text: None,
        folder: Path | None = None,
        begun: Callable[[], FirstWeights] | None = None,
    ) -> None:
        """`written`: names of all that training changes; `given`: all variables, in place of the module's first
        values; `folder`: where these are in a temporary file, None for the system's own place; `begun` gives them once,
        if they are being made already."""
        self._prepared = prepared
        self._noted = noted
        self._folder = folder
        self._begun = begun
        self._space: object = None  # what the module's first values are in
        self.draws: tuple[Draw, ...] = ()
        """Random draws, in order, that the module's first values are, once it is built."""
        self._written = written
        self._given = given
        self._found: Mapping[str, Sent] = {}
        self._others: Mapping[int, Mapping[str, Sent]] = {}
        """State of replicas but the first that a checkpoint holds for them alone."""
        self._rest: Mapping[str, Sent] | None = None
        self._base: Future[str] | None = None

    @property
    def base(self) -> str:
        """Digest of what is read again where it came from, once the module is built: no part of a checkpoint. It is
        found in the background: of a large model that takes as long as reading its files."""
        return self._base.result() if self._base is not None else ""

    @property
    def rest(self) -> Mapping[str, Sent]:
        """Variables that no stage uses or changes: they are part of a checkpoint all the same."""
        return self._complete()[1]

    def begin(self) -> None:
        self._others = {}
        self._found, self._rest = self._built()

    def load(self, checkpoint: Path) -> None:
        """UserError when it is torn, or of another model or optimizer."""
        found, unused = self._complete()
        check_base(read_manifest(checkpoint), self.base, checkpoint)
        expected = self._written | unused.keys()
        self._found, self._others = resume(found, expected, self._prepared.job.optimizer, checkpoint)

    def reads(self, checkpoint: Path) -> bool:
        """Return whether values that training does not change are to be read from this checkpoint's files: others come
        from devices' memory once the run has begun."""
        kept = (t for name, t in self._found.items() if name not in self._written and not name.startswith(OPTIMIZER))
        return any(isinstance(t, StoredTensor) and t.path.parent == checkpoint for t in kept)

    def forget_others(self) -> None:
        """Forget the state of single replicas: it is in their memory now, or lost."""
        self._others = {}

    def of(
        self, names: Collection[str], prefixes: tuple[str, ...], *, replica: int, without: Collection[str]
    ) -> dict[str, Sent]:
        """Variables of these names, and all that begins with one of these; `without` some parts of the state."""
        if not self._found.keys() >= {name for name in names if part_of(name) not in without}:
            self._complete()
        values = {**self._found, **self._others.get(replica, {})}
        return {k: v for k, v in values.items() if (k in names or k.startswith(prefixes)) and part_of(k) not in without}

    def _complete(self) -> tuple[Mapping[str, Sent], Mapping[str, Sent]]:
        """All variables, and those that no stage holds."""
        if self._rest is None:
            built, self._rest = self._built()
            self._found = {**built, **self._found}
        return self._found, self._rest

    def _built(self) -> tuple[dict[str, Sent], dict[str, Sent]]:
        made, job = self._prepared, self._prepared.job
        found: dict[str, Sent] = {}
        found |= self._given if self._given is not None else self._first()
        # Tensors that are neither parameters nor buffers are the module's own again when it is built.
        constants = {op.target for op in (*made.captured.train.ops, *made.captured.eval.ops) if op.kind == "constant"}
        own = found.keys() - constants - made.captured.constants.keys()
        if (scaling := job.training.loss_scaling) is not None:
            found[LOSS_SCALE] = LossScale(scaling).state()
        unused = rest(found, set(self._written), own)
        if not job.model.base_is_kept:
            return found, unused
        self._base = _in_background(lambda: digest_of(unused))
        return found, {}

    def _first(self) -> dict[str, Sent]:
        found = first_weights(self._prepared, self._folder) if self._begun is None else self._begun()
        self._begun = None
        self._space, self.draws = found.space, found.draws
        if found.note:
            self._noted(found.note)
        return found.values


def _in_background(act: Callable[[], str]) -> Future[str]:
    """The process may end before it is done."""
    found: Future[str] = Future()

    def run() -> None:
        try:
            found.set_result(act())
        except Exception as e:  # raised where the result is wanted
            found.set_exception(e)

    threading.Thread(target=run, name="digest of the base", daemon=True).start()
    return found


class WeightFiles:
    """The files of the model at `path`, as the job has it; empty of a model that has none."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._digests: dict[Hashable, str] = {}

    def of(self, values: Mapping[str, Sent]) -> tuple[WeightFile, ...]:
        """Where those of the values are that lie in the model's files."""
        by_path: dict[Path | StoreFile, dict[str, StoredTensor]] = {}
        for name, value in values.items():
            if isinstance(value, StoredTensor):
                by_path.setdefault(value.store or value.path, {})[name] = value
        return tuple(
            msgspec.structs.replace(file, tensors=tuple(self._tensor(name, value) for name, value in stored.items()))
            for path, stored in by_path.items()
            if (file := self._file(path)) is not None
        )

    def drawn(self, values: Mapping[str, Sent], draws: Sequence[Draw], seed: int) -> Draws | None:
        """The draws from the seed on that some of the values are, as far as repeating them takes no long time."""
        ends = list(itertools.accumulate(draw.elements for draw in draws))
        tensors = tuple(
            DrawnTensor(name=name, shape=value.header.shape, origin=value.drawn, sha256=self._digest(value))
            for name, value in values.items()
            if isinstance(value, StoredTensor) and value.drawn is not None and ends[value.drawn.draw] <= MOST_REPEATED
        )
        last = max((tensor.origin.draw for tensor in tensors), default=-1)
        return Draws(seed=seed, draws=tuple(draws[: last + 1]), tensors=tensors) if tensors else None

    def _file(self, path: Path | StoreFile) -> WeightFile | None:
        """It without tensors; None of a file that is elsewhere."""
        if isinstance(path, StoreFile):
            return WeightFile(model=path.url, file=path.name, size=path.size, version=path.version, tensors=())
        place = self._place(path)
        return WeightFile(model=self._path, commit=place[0], file=place[1], tensors=()) if place is not None else None

    def _place(self, path: Path) -> tuple[str, str] | None:
        """The commit, empty of a folder, and the file's path in it; None of a file that is elsewhere."""
        if not self._path:
            return None
        folder = Path(self._path).expanduser()
        if folder.is_dir():
            return ("", path.relative_to(folder).as_posix()) if path.is_relative_to(folder) else None
        _, cached, rest = path.as_posix().partition("/snapshots/")
        commit, _, file = rest.partition("/")
        return (commit, file) if cached and f"models--{self._path.replace('/', '--')}" in path.parts else None

    def _tensor(self, name: str, value: StoredTensor) -> FileTensor:
        raw = value.raw()
        in_store = raw.store is not None
        return FileTensor(
            name=name,
            key=value.key,
            dtype=raw.header.dtype,
            shape=raw.header.shape,
            cast=value.header.dtype if value.stored else "",
            sha256=raw.sha256 if in_store else self._digest(raw),
            offset=raw.offset if in_store else 0,
        )

    def _digest(self, raw: StoredTensor) -> str:
        if (place := place_of(raw)) not in self._digests:
            digest = hashlib.sha256()
            for piece in raw.pieces():
                digest.update(piece)
            self._digests[place] = digest.hexdigest()
        return self._digests[place]


class Placed:
    """The tensors that each device is to read from files of its own or to draw, until it says which it lacks."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[PlaceWeights, Mapping[str, Sent]]] = {}

    def split(
        self,
        device: str,
        body: PlaceWeights,
        values: Mapping[str, Sent],
        files: Sequence[WeightFile],
        drawn: Draws | None = None,
    ) -> tuple[PlaceWeights, Mapping[str, Sent]]:
        """The order, and the values to send with it."""
        there = {tensor.name for one in (*files, *([drawn] if drawn else ())) for tensor in one.tensors}
        self._asked[device] = body, {name: value for name, value in values.items() if name in there}
        rest = {name: value for name, value in values.items() if name not in there}
        return msgspec.structs.replace(body, files=tuple(files), drawn=drawn), rest

    def lacking(self, device: str, names: Sequence[str]) -> tuple[PlaceWeights, Mapping[str, Sent]]:
        """The order again, with the values that a device lacks. PeerError for others, or if it has said so before."""
        body, asked = self._asked.pop(device, (PlaceWeights(epoch=0), {}))
        if unknown := set(names) - asked.keys():
            raise PeerError(f"lacks weights that it was not asked for, such as {min(unknown)!r}")
        return body, {name: asked[name] for name in names}
