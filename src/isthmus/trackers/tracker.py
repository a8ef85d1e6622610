"""The protocol of trackers, to which each library is adapted.

Trackers by name: ours, and those that other packages register under `isthmus.trackers`.

A tracker of another package is a callable that takes its options by name and gives a `Tracker`. Ours are imported when
they are used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol, cast

import msgspec

from isthmus.errors import UserError, unknown_name
from isthmus.extensions import check_arguments, import_object, load_third_party, read_options, third_party, to_install
from isthmus.option_docs import OptionDoc, argument_docs, first_line, option_docs


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as trackers get it at its start."""

    name: str  # the name of its folder
    project: str
    group: str  # runs of one sweep have the same; empty: none
    id: str  # 32 hexadecimal digits, the same in every session of the run
    resumed: bool  # whether an earlier session has called `start` with this id
    folder: Path  # the run's folder, an absolute path
    settings: Mapping[str, str | int | float | bool]  # the job: "training.steps" and so on


class Tracker(Protocol):
    """One run's way into a tracker. Made for a run, used by one thread of the coordinator's process.

    Every method may be slow and may raise: the run goes on, and the tracker gets nothing more.
    """

    def start(self, run: TrackedRun) -> None:
        """The first call."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """After so many steps or rounds. Names are as `loss`, `step_s`, `busy/DEVICE`. A step may come again after a
        loss of devices."""

    def event(self, step: int, text: str) -> None:
        """A device was lost, another plan is in force, ..."""

    def picture(self, name: str, path: Path) -> None:
        """A PNG file: `plan`, `timeline`, `loss`, ..."""

    def end(self, outcome: str) -> None:
        """The last call. Returns when everything is written."""


def flat(settings: Mapping[str, object], path: str = "") -> dict[str, str | int | float | bool]:
    """Keys of inner tables and places in lists joined by dots. Values that are none are left out.

    >>> flat({"training": {"steps": 3, "clip_norm": None}, "optimizer": [{"lr": 0.1}]})
    {'training.steps': 3, 'optimizer.0.lr': 0.1}
    """
    return dict(_items(settings, path))


def _items(value: object, path: str) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, object]", value).items():
            yield from _items(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(cast("list[object]", value)):
            yield from _items(inner, f"{path}.{place}")
    elif isinstance(value, str | int | float):
        yield path, value


class Track(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run's figures go besides its folder. A tracker that fails never stops the run.

    >>> Track(to=("tensorboard", "wandb"), options={"wandb": {"mode": "offline"}}).project
    'isthmus'
    """

    to: str | tuple[str, ...] = ()
    """`csv`, `jsonl`, `tensorboard`, `wandb`, `trackio`, `mlflow`, `prometheus`, a name registered under the
    entry-point group `isthmus.trackers`, or `package.module:Class` of your own."""
    project: Annotated[str, msgspec.Meta(min_length=1)] = "isthmus"
    """Project of wandb and trackio, experiment of mlflow."""
    group: str = ""  # Runs that belong together. Empty: of a sweep its name, else none.
    options: dict[str, dict[str, object]] = {}  # A table of options for each tracker (`isthmus describe NAME`).

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all trackers."""
        return (self.to,) if isinstance(self.to, str) else self.to

    def check(self) -> None:
        """UserError for a tracker named twice, and for options of one that is not named."""
        for name in self.names:
            if self.names.count(name) > 1:
                raise UserError(f"track.to: got {name!r} twice, expected each once")
        for name in self.options:
            if name not in self.names:
                raise UserError(f"track.options: got {name!r}, expected one of track.to: {', '.join(self.names)}")


ENTRY_POINTS = "isthmus.trackers"


class OurTracker(NamedTuple):
    """One of our adapters, as `module:name`."""

    tracker: str  # a class that is built with the options
    options: str  # a struct of its options
    library: str  # the library that has to be installed for it


def _ours(module: str, name: str, library: str) -> OurTracker:
    where = f"isthmus.trackers.{module}"
    return OurTracker(f"{where}:{name}Tracker", f"{where}:{name}Options", library)


_OURS: Mapping[str, OurTracker] = {
    "csv": _ours("files", "CsvFile", "csv"),
    "jsonl": _ours("files", "JsonLines", "json"),
    "tensorboard": _ours("tensorboard", "TensorBoard", "tensorboard"),
    "wandb": _ours("wandb", "Wandb", "wandb"),
    "trackio": _ours("trackio", "Trackio", "trackio"),
    "mlflow": _ours("mlflow", "Mlflow", "mlflow"),
    "prometheus": _ours("prometheus", "Prometheus", "prometheus_client"),
}


def tracker_names() -> list[str]:
    """Every name that `[track] to` takes, sorted. Ours win over a third party's of the same name."""
    return sorted({*_OURS, *third_party(ENTRY_POINTS)})


def tracker_options(name: str) -> type[msgspec.Struct]:
    return cast("type[msgspec.Struct]", import_object("track.to", _OURS[name].options))


def describe_tracker(name: str) -> tuple[str, tuple[OptionDoc, ...]]:
    """One line on a tracker, and its options. UserError for an unknown name."""
    if name in _OURS:
        struct = tracker_options(name)
        return first_line(struct), option_docs(struct)
    others = third_party(ENTRY_POINTS)
    if name not in others:
        raise unknown_name("tracker", name, tracker_names())
    found = load_third_party(others[name])
    return first_line(found), argument_docs(found)


def check_trackers(track: Track) -> None:
    """UserError for an unknown name, option or value. What libraries are installed matters to the coordinator alone."""
    track.check()
    for name in track.names:
        _builder(name, track.options.get(name, {}))


def tracker_builders(track: Track) -> dict[str, Callable[[], object]]:
    """Return the builder of each tracker that is named. Nothing is started, and no library is imported. UserError for
    an unknown name, option or value, and for a library that is not installed."""
    check_trackers(track)
    for name in track.names:
        if name in _OURS:
            _check_libraries(name, track.options.get(name, {}))
    return {name: _builder(name, track.options.get(name, {})) for name in track.names}


def _check_libraries(name: str, options: Mapping[str, object]) -> None:
    """UserError for one that is not installed. Options may say which they need."""
    first = _OURS[name].library
    read = read_options(f"track.options.{name}:", options, tracker_options(name))
    libraries: tuple[str, ...] = getattr(read, "libraries", (first,))
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    if first in missing:
        raise UserError(f"track.to: {name} needs {first}: {to_install(first)}")
    if missing:
        raise UserError(
            f"track.to: {name} stores figures on this machine with {', '.join(missing)}, not installed here: "
            f'{to_install(first)}, or name a server: track.options.{name}.uri = "https://..."'
        )


def _builder(name: str, options: Mapping[str, object]) -> Callable[[], object]:
    if name in _OURS:
        ours = _OURS[name]
        read = read_options(f"track.options.{name}:", options, tracker_options(name))
        return lambda: cast("Callable[[msgspec.Struct], Tracker]", import_object("track.to", ours.tracker))(read)
    others = third_party(ENTRY_POINTS)
    if name not in others and ":" not in name:
        raise unknown_name("track.to", name, [*tracker_names(), "package.module:Class"])
    found = load_third_party(others[name]) if name in others else import_object("track.to", name)
    if not callable(found):
        raise UserError(f"track.to: {name!r}: expected a class with the methods of a tracker, got {found!r:.80}")
    build: Callable[..., object] = found
    check_arguments("track.to", name, build, options)
    return lambda: build(**options)
