"""The merger in a process of its own, beside the process that starts it and not ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import cast

import msgspec
from torch import Tensor

from isthmus.cost import Decoupled
from isthmus.errors import UserError
from isthmus.extensions import import_extra
from isthmus.plans import OuterOptimizer
from isthmus.programs.merger import Merger
from isthmus.protocol.decoupled_events import MergeChanges, MergeRules
from isthmus.run_files import LinesFile
from isthmus.runtime.decoupled.merged_run import MERGES, MergeLine, merges_file
from isthmus.runtime.decoupled.merger import MergerHost, MergerWatch
from isthmus.runtime.transport.listener import Listener
from isthmus.training.decoupled import MergedFragments, change_codec, delta_codec
from isthmus.training.layout import TensorHeader, header_of, pack, receive_buffer, unpack

TITLE = "isthmus merger"
FINAL_S = 3600.0
"""For replicas to receive the merged model at the end. One that receives nothing is given up after the timeout."""
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from isthmus.runtime.decoupled.merger_process import serve; serve()"
"""Imports what the process that starts it would import."""


class MergerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A merger gets this at its start, besides the first weights."""

    run: str  # the run's secret name
    host: str  # where it listens
    replicas: tuple[str, ...]
    rules: MergeRules
    decoupled: Decoupled
    record: str | None  # folder of the record of merges


class _Started(msgspec.Struct, frozen=True, kw_only=True):
    port: int = 0
    error: str = ""


class MergerProcess:
    """The merger's process, as seen by the process that starts it. The start takes as long as to import torch:
    `address` waits for it."""

    def __init__(self, spec: MergerSpec, start: Sequence[Tensor]) -> None:
        """`start` are the first weights of the fragments, flat."""
        self._host = spec.host
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None, "a pipe"
        # A process that has ended is noticed where its answer is read.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            headers = [header_of(str(number), values) for number, values in enumerate(start)]
            stdin.write(msgspec.json.encode(spec) + b"\n" + msgspec.json.encode(headers) + b"\n")
            for values in start:
                stdin.write(pack(values))

    def address(self) -> str:
        """HOST:PORT. UserError for a merger that cannot listen, or has not started."""
        assert self._process.stdout is not None, "a pipe"
        with self._process.stdout as stdout:
            answer = stdout.readline()
        if not answer:
            raise UserError(f"{TITLE}: its process ended with {self._process.wait()} before it listened")
        started = msgspec.json.decode(answer, type=_Started)
        if started.error:
            raise UserError(f"{TITLE}: {started.error}")
        return f"{self._host}:{started.port}"

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def join(self, timeout_s: float) -> None:
        """Wait for its end, which comes when every replica has received the end of the run."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


def serve() -> None:
    """The process itself: what it is to do comes over standard input; it answers with its port."""
    import_extra("setproctitle", TITLE).setproctitle(TITLE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its replicas have ended
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=MergerSpec)
    start = [_received(header) for header in msgspec.json.decode(sys.stdin.buffer.readline(), type=list[TensorHeader])]
    try:
        watch = _watch(spec.record)
        listener = Listener(spec.host, trusted_network=True, timeout_s=spec.rules.timeout_s)
    except UserError as e:
        _answer(_Started(error=str(e)))
        sys.exit(1)
    outer = OuterOptimizer(rate=spec.decoupled.rate, momentum=spec.decoupled.momentum)
    host = MergerHost(
        Merger(spec.rules, spec.replicas, final_s=FINAL_S),
        MergedFragments(start, outer, change_codec(spec.decoupled)),
        delta_codec(spec.decoupled),
        dict.fromkeys(spec.replicas),
        spec.run,
        spec.rules.timeout_s,
        watch,
    )
    listener.start(host.acceptor.on_connection)
    _answer(_Started(port=listener.port))
    finish = host.coordinate()
    if finish.outcome == "lost":
        _note(f"the run ended: {finish.reason}")
    listener.close()


def _received(header: TensorHeader) -> Tensor:
    flat, buffer = receive_buffer(header)
    if cast(BufferedReader, sys.stdin.buffer).readinto(buffer) < buffer.nbytes:
        sys.exit(f"{TITLE}: the process that started it has ended")
    return unpack(flat, header)


def _answer(started: _Started) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(started) + b"\n")
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _watch(record: str | None) -> MergerWatch:
    """UserError for a folder of the record that has one already, or cannot be made."""
    files: list[LinesFile[MergeLine]] = [] if record is None else [_new_record(Path(record))]

    def merged(merge: MergeChanges, seconds: float) -> None:
        try:
            for lines in files:
                lines.add(MergeLine(seconds=seconds, merge=merge))
        except UserError as e:  # the run is worth more than its record
            files.clear()
            _note(str(e))

    return MergerWatch(stepped=lambda *_: None, merged=merged, note=_note)


def _new_record(folder: Path) -> LinesFile[MergeLine]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MERGES).touch(exist_ok=False)
    except FileExistsError:
        raise UserError(f"sync option 'record': got {folder}, expected a folder without {MERGES}") from None
    except OSError as e:
        raise UserError(f"sync option 'record': got {folder}: {e.strerror or e}") from None
    return merges_file(folder)


def _note(text: str) -> None:
    with contextlib.suppress(OSError):  # who read it may be gone
        sys.stderr.write(f"isthmus.sync: {text}\n")
