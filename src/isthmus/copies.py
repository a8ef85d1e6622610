"""Copies of this process that do one thing and end: what they import, and the memory that they need, goes with them.

A fork must come before this process has threads: a lock that a thread holds at that moment stays locked in the copy.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Generic, NoReturn, TypeVar

import msgspec

from isthmus import errors
from isthmus.errors import InternalError, IsthmusError, PeerError, UserError

T = TypeVar("T")
_ALONE = threading.RLock()
_ENDING = (signal.SIGINT, signal.SIGTERM)


class _Warning(msgspec.Struct, frozen=True):
    category: str
    text: str
    file: str
    line: int

    @classmethod
    def of(cls, found: warnings.WarningMessage) -> _Warning:
        return cls(found.category.__name__, str(found.message), found.filename, found.lineno)

    def warn(self) -> None:
        known: type[Warning] | None = getattr(errors, self.category, getattr(builtins, self.category, None))
        warnings.warn_explicit(self.text, known or UserWarning, self.file, self.line)


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    value: msgspec.Raw = msgspec.Raw(b"null")
    failed: str = ""  # what was raised, and its traceback
    kind: str = ""  # of a UserError: its class
    traceback: str = ""
    left: bool = False  # by `sys.exit`, with this code or text
    code: int | str | None = None
    warned: tuple[_Warning, ...] = ()


def can_copy() -> bool:
    """Return whether a copy of this process can compute: it has no other threads, nor libraries with their own."""
    torch = sys.modules.get("torch")
    alone = sys.platform == "linux" and threading.active_count() == 1 and "jax" not in sys.modules
    return alone and (torch is None or not torch.cuda.is_initialized())


def in_a_copy(question: Callable[[], T], kind: type[T], doing: str) -> T:
    """Return the same as `asked` where this process can be copied; else the answer is found here."""
    return asked(partial(_with_one_thread, question), kind, doing) if can_copy() else _alone(question)


def _alone(question: Callable[[], T]) -> T:
    """Answer where another thread may ask as well: torch traces, and libraries are patched, for the whole process."""
    with _ALONE:
        return question()


def _with_one_thread(question: Callable[[], T]) -> T:
    """Threads of torch's pool were not copied."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    return question()


def asked(question: Callable[[], T], kind: type[T], doing: str = "a copy of this process") -> T:
    """The answer of a copy of this process, as of `Copy`."""
    return Copy(question, kind, doing).answer()


def asked_at_once(questions: Sequence[Callable[[], T]], kind: type[T]) -> list[T]:
    """Return the same as `asked`, of several copies that find their answers at the same time."""
    begun = [Copy(question, kind) for question in questions]
    return [copy.answer() for copy in begun]


def begun_in_a_copy(question: Callable[[], T], kind: type[T], doing: str) -> Callable[[], T]:
    """Return what gives the same as `in_a_copy`: the copy begins now, and the call waits for its answer."""
    return Copy(partial(_with_one_thread, question), kind, doing).answer if can_copy() else partial(_alone, question)


class Copy(Generic[T]):
    """A copy of this process that finds an answer, and leaves no trace here. It ends with this process and this object.

    The answer's type is one that JSON has. `doing`, in words, is what failed where it gives none.
    """

    def __init__(self, question: Callable[[], T], kind: type[T], doing: str = "a copy of this process") -> None:
        self._kind, self._doing = kind, doing
        # A file: the end of a pipe does not come before that of the last process that the copy has started.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._line = os.pipe()  # it closes with this process, however that ends
        self._temporary = tempfile.mkdtemp(prefix="isthmus-copy-")  # what it leaves there is removed, however it ends
        self._pid = forked_copy(partial(_answer, question, self._file, self._temporary, *self._line))
        self._end = weakref.finalize(self, _end, os.getpid(), self._pid, self._file, self._temporary, self._line)

    def answer(self) -> T:
        """Wait for it. Its warnings are given here, its UserError or SystemExit raised; InternalError says why it has
        none."""
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        except BaseException:  # Ctrl-C too
            self._end()
            raise
        self._end.detach()
        with self._file:
            _close(self._temporary, self._line)
            self._file.seek(0)
            return _read(self._file.read(), code, self._kind, self._doing)


def _end(ours: int, pid: int, file: IO[bytes], temporary: str, line: Iterable[int]) -> None:
    if os.getpid() != ours:  # another copy, which has this object too
        return
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    file.close()
    _close(temporary, line)


def _close(temporary: str, line: Iterable[int]) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    for end in line:
        os.close(end)


def _answer(question: Callable[[], object], back: IO[bytes], temporary: str, line: int, ours: int) -> None:
    os.close(ours)
    tempfile.tempdir = temporary
    handle_signals(signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=end_with_parent, args=(line,), name="parent_pipe", daemon=True).start()
    with warnings.catch_warnings(record=True) as warned:
        try:
            answer = _Answer(value=msgspec.Raw(msgspec.json.encode(question(), enc_hook=_as_text)))
        except SystemExit as e:
            code = e.code if isinstance(e.code, int | None) else str(e.code)
            answer = _Answer(left=True, code=code)
        except (Exception, KeyboardInterrupt) as e:
            text, kind = (str(e), type(e).__name__) if isinstance(e, UserError) else (f"{type(e).__name__}: {e}", "")
            answer = _Answer(failed=text or type(e).__name__, kind=kind, traceback=traceback.format_exc())
    answer = msgspec.structs.replace(answer, warned=tuple(map(_Warning.of, warned)))
    back.write(msgspec.json.encode(answer))
    back.flush()


def _as_text(value: object) -> str:
    assert isinstance(value, Path)
    return str(value)


def _read(text: bytes, code: int, kind: type[T], doing: str) -> T:
    if not text or code:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        why = {-signal.SIGKILL: ": it may be that no memory was left", -signal.SIGSEGV: ": code that it calls crashed"}
        raise InternalError(f"{doing} ended {how} without an answer{why.get(code, '')}")
    answer = msgspec.json.decode(text, type=_Answer)
    for warned in answer.warned:
        warned.warn()
    if answer.left:
        sys.exit(answer.code)
    if not answer.failed:
        return msgspec.json.decode(answer.value, type=kind, dec_hook=lambda as_type, value: as_type(value))
    known = {error.__name__: error for error in (UserError, *UserError.__subclasses__())}
    error = known.get(answer.kind, UserError)(answer.failed) if answer.kind else None
    error = error or InternalError(f"{doing} failed: {answer.failed}")
    error.add_note(answer.traceback)
    raise error


def forked_copy(live: Callable[[], None]) -> int:
    """The process id of a copy that calls `live`, which first calls `handle_signals`, and then ends.

    Until then signals wait: a handler of this process that raised in the copy would take it on where it was forked, as
    a second coordinator.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        pid = os.fork()
        if not pid:
            end_after(live)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def handle_signals(interrupt: signal.Handlers) -> None:
    """Set how a copy takes Ctrl-C; SIGTERM ends it."""
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def end_with_parent(parent_pipe: int) -> None:
    """In a thread of the child: end this process when the pipe closes, also out of a long computation, and out of a
    wait for others that may never come."""
    while os.read(parent_pipe, 4096):  # not through sys.stdin, whose lock would be held while the interpreter ends
        pass
    os._exit(PeerError.exit_code)


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
