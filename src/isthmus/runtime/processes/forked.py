"""Processes that begin as copies of this one: nothing is imported or read again, and memory is shared until written.

A fresh interpreter imports torch for seconds; a fork takes milliseconds. It must come before this process has threads:
a lock that a thread holds at that moment stays locked in the copy.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from isthmus.errors import InternalError, IsthmusError, PeerError, UserError


class Forked:
    """Forked copies of this process by name. Each waits until it receives an address. A context manager: on exit it
    ends the copies that still run. They end with this process even if it is killed."""

    def __init__(self, names: Mapping[str, Callable[[str], None]], logs: Path) -> None:
        """Each copy calls its function with the address. Under `logs` goes what it writes to standard error."""
        logs.mkdir(parents=True, exist_ok=True)
        self._pids: dict[str, int] = {}
        self._parent_pipes: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self._logs = {name: logs / f"{name}.log" for name in names}
        gc.freeze()  # collecting in a copy would write to every page
        for name, act in names.items():
            end, parent_pipe = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(parent_pipe)
                for other in self._parent_pipes.values():  # else a copy would keep its siblings alive
                    os.close(other)
                end_after(partial(_live, act, end, self._logs[name]))
            os.close(end)
            self._pids[name], self._parent_pipes[name] = pid, parent_pipe
        gc.unfreeze()

    def begin(self, address: str) -> None:
        """Tell all of them."""
        for parent_pipe in self._parent_pipes.values():
            with contextlib.suppress(BrokenPipeError):
                os.write(parent_pipe, address.encode() + b"\n")

    def ended(self) -> dict[str, str]:
        """Those that have ended other than well, and how."""
        for name in self._pids.keys() - self._codes.keys():
            self._look(name)
        return {name: self._how(name, code) for name, code in self._codes.items() if code}

    def pids(self) -> dict[str, int]:
        return dict(self._pids)

    def _look(self, name: str) -> None:
        pid, status = os.waitpid(self._pids[name], os.WNOHANG)
        if pid:
            self._codes[name] = os.waitstatus_to_exitcode(status)

    def _how(self, name: str, code: int) -> str:
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with code {code}, see {self._logs[name]}"

    def __enter__(self) -> Forked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # they were halted; else nobody told them
            self._wait(5.0)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for name in self._pids.keys() - self._codes.keys():
                os.kill(self._pids[name], number)
            self._wait(2.0)
        for parent_pipe in self._parent_pipes.values():
            os.close(parent_pipe)

    def _wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while (left := self._pids.keys() - self._codes.keys()) and time.monotonic() < deadline_s:
            for name in left:
                self._look(name)
            time.sleep(0.005)


_FAILED, _REFUSED = "failed: ", "refused: "


def asked(question: Callable[[], int]) -> int:
    """The answer of a copy of this process, which leaves no trace here. InternalError says why it gave none; its
    UserError is raised here."""
    return asked_at_once([question])[0]


def asked_at_once(questions: Sequence[Callable[[], int]]) -> list[int]:
    """As `asked`, of several copies that find their answers at the same time."""
    copies: list[tuple[int, int]] = []
    for question in questions:
        end, back = os.pipe()
        pid = os.fork()
        if not pid:
            _answer(question, back)
        os.close(back)
        copies.append((pid, end))
    answers: list[bytes] = []
    for pid, end in copies:
        with open(end, "rb") as pipe:
            answers.append(pipe.read())
        os.waitpid(pid, 0)
    return [_read(answer) for answer in answers]


def _answer(question: Callable[[], int], back: int) -> NoReturn:
    try:
        os.write(back, str(question()).encode())
    except UserError as e:
        os.write(back, f"{_REFUSED}{e}".encode()[:4096])
    except Exception as e:
        os.write(back, f"{_FAILED}{type(e).__name__}: {e}".encode()[:4096])
    finally:
        os._exit(0)


def _read(answer: bytes) -> int:
    if answer.startswith(_REFUSED.encode()):
        raise UserError(answer[len(_REFUSED) :].decode(errors="replace"))
    if not answer or answer.startswith(_FAILED.encode()):
        why = answer[len(_FAILED) :].decode(errors="replace") or "it ended without an answer"
        raise InternalError(f"a copy of this process failed: {why}")
    return int(answer)


def _live(act: Callable[[str], None], parent_pipe: int, log: Path) -> None:
    """What the copy does with its life."""
    os.setpgid(0, 0)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 2)
    os.dup2(output, 1)  # stdout is the parent's data
    address = bytearray()
    while not address.endswith(b"\n"):
        read = os.read(parent_pipe, 256)
        if not read:
            return  # nobody is left to work for
        address += read
    threading.Thread(target=_end_with, args=(parent_pipe,), name="parent_pipe", daemon=True).start()
    act(address.decode().strip())


def end_after(live: Callable[[], None]) -> NoReturn:
    """Do it, and end this process with the exit code: a copy must never go on where it was forked."""
    code = InternalError.exit_code
    try:
        live()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except IsthmusError as e:
        print(e, file=sys.stderr)
        code = e.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _end_with(parent_pipe: int) -> None:
    while os.read(parent_pipe, 4096):
        pass
    os._exit(PeerError.exit_code)
