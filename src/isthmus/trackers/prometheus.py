"""Prometheus: a text file for the node exporter, and a page that a Prometheus server reads."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from isthmus.extensions import import_extra
from isthmus.trackers.tracker import TrackedRun

WRITE_S = 1.0  # between two writes of the file: a server reads it less often


class PrometheusOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Prometheus: a text file for the node exporter, or a page at /metrics."""

    file: str = ""
    """For the node exporter's textfile collector; its name ends in `.prom`. Empty: `metrics.prom` in the run's
    folder."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Where http://HOST:PORT/metrics is, while the run goes on; 0: nowhere."""
    host: str = "127.0.0.1"  # Address of that page. Every process that reaches it reads the figures.


class PrometheusTracker:
    """Each figure is a gauge `isthmus_NAME` with labels `run` and `group`. The device of `busy/DEVICE` is a label,
    `of`. Texts, settings and pictures have no place there."""

    def __init__(self, options: PrometheusOptions) -> None:
        self._options = options
        self._library: Any = None
        self._registry: Any = None
        self._server: Any = None
        self._gauges: dict[str, Any] = {}
        self._labels: dict[str, str] = {}
        self._shown: defaultdict[str, set[str]] = defaultdict(set)
        """The values of `of` that each gauge has a figure for."""
        self._file = ""
        self._written_s = 0.0

    def start(self, run: TrackedRun) -> None:
        said = self._options
        self._library = library = import_extra("prometheus_client", "track.to: prometheus")
        self._registry = library.CollectorRegistry()
        self._labels = {"run": run.name, "group": run.group}
        self._file = said.file or str(run.folder / "metrics.prom")
        self._set("running", 1.0, "1 while the run goes on")
        if said.port:
            self._server, _ = library.start_http_server(said.port, addr=said.host, registry=self._registry)
        self._write()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._set("step", step, "steps or rounds done")
        for name, value in figures.items():
            self._set(name, value, name.partition("/")[0].replace("_", " "))
        self._forget(figures)
        if time.monotonic() - self._written_s >= WRITE_S:
            self._write()

    def event(self, step: int, text: str) -> None:
        """Their number is a figure, `faults`."""

    def picture(self, name: str, path: Path) -> None:
        """It has no place there."""

    def end(self, outcome: str) -> None:
        self._set("running", 0.0, "1 while the run goes on")
        self._set(f"outcome/{outcome}", 1.0, "how the run ended")
        self._write()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _forget(self, figures: Mapping[str, float]) -> None:
        """A device that is lost has no figure any more: Prometheus would show its last one for ever."""
        given: dict[str, set[str]] = {}
        for figure in figures:
            name, _, of = figure.partition("/")
            if of:
                given.setdefault(_metric(name), set()).add(of)
        for name, now in given.items():
            for of in self._shown[name] - now:
                self._gauges[name].remove(*(self._labels | {"of": of}).values())
            self._shown[name] = now

    def _set(self, figure: str, value: float, words: str) -> None:
        name, _, of = figure.partition("/")
        name = _metric(name)
        labels = self._labels | ({"of": of} if of else {})
        if name not in self._gauges:
            self._gauges[name] = self._library.Gauge(name, words, list(labels), registry=self._registry)
        self._gauges[name].labels(**labels).set(value)
        if of:
            self._shown[name].add(of)

    def _write(self) -> None:
        self._written_s = time.monotonic()
        self._library.write_to_textfile(self._file, self._registry)  # complete or as it was


def _metric(name: str) -> str:
    return "isthmus_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
