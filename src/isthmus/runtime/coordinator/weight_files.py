"""Weights that devices need not be sent: those of a pretrained model's files, which they may have themselves, and those
that they can draw."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import msgspec

from isthmus.errors import PeerError
from isthmus.protocol.draws import Draw, DrawnTensor, Draws
from isthmus.protocol.run_messages import FileTensor, PlaceWeights, WeightFile
from isthmus.stores import StoreFile
from isthmus.training.draws import MOST_REPEATED
from isthmus.training.stored import Sent, StoredTensor, place_of


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
            sha256="" if in_store else self._digest(raw),
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
