"""Interpreters that run a script, or a module of Isthmus: copies of one that has imported torch for three seconds.

Within `copied()` a process that is wanted of `subprocess` is a copy of the one that this file is the program of. It has
its own arguments, folder, environment, descriptors and session, and ends as any interpreter does. It is a child of the
process that was copied, which `processes` leaves out.

Started as ever are other programs, `python -c`, commands in front (as of a namespace), what needs other settings of
Python or of threads, and all that commands themselves start.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import inspect
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import msgspec
import setproctitle

TITLE = "isthmus interpreters"
IMPORTED = (
    "cryptography.hazmat.backends.openssl",
    "isthmus.cli.app",
    "isthmus.api.training",
    "isthmus.api.join",
    "isthmus.api.serve",
    "isthmus.api.sweep",
    "isthmus.graph.capture",
    "isthmus.report.timeline",
    "isthmus.runtime.device_fork_server",
    "isthmus.runtime.launchers.agent_fork_server",
    "pydantic.type_adapter",  # of typer, at the first option
    "torch._dynamo",  # at the first capture
)
"""What most of them import, before or while they work; each imports the rest by itself."""
PLANNING_WORK = 2e7
"""Less than the five seconds that a command spends on the bound of its plan: what a check accepts does not depend on
it."""
EARLY = ("PYTHON", "OMP_", "LD_", "MALLOC_", "TORCH_", "PYTORCH_")
"""How the names of variables begin that are read before torch is imported, or then."""
LATE = {"PYTHONPATH", "PYTHONUNBUFFERED"}
"""But for these, which copies heed."""
MESSAGE_BYTES = 1 << 18
STATUS_BYTES = 4


class Wanted(msgspec.Struct, frozen=True):
    module: str
    """Of Isthmus; "" for a script, whose path is the first of the arguments."""
    arguments: tuple[str, ...]
    safe: bool
    """`-P`: modules do not come from the current folder."""
    folder: str
    environment: dict[str, str]
    session: bool
    group: int
    """Process group; -1: that of the tests."""


class Process(NamedTuple):
    parent: int
    title: str
    """Its command line, or what it calls itself."""


class Original:
    """The process that is copied. It starts with the first copy, and ends with the tests."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._line: socket.socket | None = None
        self._starting = threading.Lock()

    def could_be(self, environment: Mapping[str, str]) -> bool:
        return _early(environment) == _early(self._environment)

    def copy(self, wanted: Wanted, descriptors: list[int]) -> tuple[int, int]:
        """Its pid, and the end of a pipe from which its exit status will come."""
        with self._starting:
            if self._line is None:
                self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    _Popen([sys.executable, __file__], stdin=theirs, env=self._environment, cwd="/")
        read, write = os.pipe()
        try:
            socket.send_fds(self._line, [msgspec.json.encode(wanted)], [*descriptors, write])
        finally:
            os.close(write)
        said = os.read(read, STATUS_BYTES)
        assert said, f"{TITLE}: it has ended"
        return int.from_bytes(said, "little"), read


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(EARLY) and k not in LATE}


_Popen = subprocess.Popen


class Copied(subprocess.Popen):
    """Starts in another way than `Popen`, and is waited for in another way."""

    original: ClassVar[Original]
    status: int | None = None
    """Where its exit status comes from; None for a process that is no copy."""

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments
        wanted = _wanted(asked, self.original)
        if wanted is None:
            super()._execute_child(*given)
            return
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid, self.status = self.original.copy(wanted, [n if end < 0 else end for n, end in enumerate(ends)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self.status is None:
            return super()._try_wait(wait_flags)
        waiting = select.poll()
        waiting.register(self.status, select.POLLIN)
        if not waiting.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        with open(self.status, "rb") as pipe:
            return self.pid, int.from_bytes(pipe.read(STATUS_BYTES), "little")

    def _internal_poll(self, *given: Any, **asked: Any) -> int | None:
        if self.status is None:
            return super()._internal_poll(*given, **asked)
        if self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def _wanted(asked: Mapping[str, Any], original: Original) -> Wanted | None:
    """None for what is started as ever."""
    words = [os.fspath(word) for word in asked["args"]] if isinstance(asked["args"], list | tuple) else []
    if safe := words[1:2] == ["-P"]:
        del words[1]
    is_module = words[1:2] == ["-m"] and words[2].startswith("isthmus")
    is_script = not safe and words[1:2] != [] and words[1].endswith(".py")
    if words[:1] != [sys.executable] or not (is_module or is_script):
        return None
    environment = dict(os.environ if asked["env"] is None else asked["env"])
    folder, group = os.path.abspath(asked["cwd"] or "."), asked["process_group"]
    other = any(asked[name] for name in ("executable", "preexec_fn", "pass_fds", "shell", "gids"))
    if other or not original.could_be(environment) or not os.path.isdir(folder):
        return None
    module, arguments = (words[2], words[3:]) if is_module else ("", words[1:])
    return Wanted(module, tuple(arguments), safe, folder, environment, asked["start_new_session"], group)


@contextlib.contextmanager
def copied() -> Generator[None]:
    with mock.patch.object(subprocess, "Popen", type("Popen", (Copied,), {"original": Original()})):
        yield


def script(text: str, folder: Path) -> list[str]:
    """The beginning of a command line: unlike `python -c`, this is copied."""
    path = folder / "script.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def processes() -> dict[int, Process]:
    """All of this machine that have not ended, by pid. The parent of a copy is who wanted it."""
    found: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if state != "Z":
                    found[int(entry.name)] = Process(int(parent), title)
    wanting = {pid: process.parent for pid, process in found.items() if process.title == TITLE}
    return {pid: process._replace(parent=wanting.get(process.parent, process.parent)) for pid, process in found.items()}


def _serve() -> tuple[Wanted, list[int]]:
    """Returns in copies alone, which are yet to become what is wanted."""
    before = dict(os.environ)
    for module in IMPORTED:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:  # else of an extra that is not here
            importlib.import_module(module)
    mock.patch("isthmus.api.make_plan.PLANNING_WORK", PLANNING_WORK).start()
    setproctitle.setproctitle(TITLE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # collecting in a copy would write to every page
    line, ends = socket.socket(fileno=os.dup(0)), dict[int, int]()
    made = {name: value for name, value in os.environ.items() if name not in before}  # by what was imported
    with selectors.DefaultSelector() as waiting:
        waiting.register(line, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not line:
                    waiting.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(key.data, 0)
                    _say(ends[key.data], status)
                    os.close(ends.pop(key.data))
                    continue
                said, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 4)
                if not said:
                    os._exit(0)
                wanted = msgspec.json.decode(said, type=Wanted)
                pid = os.fork()
                if not pid:
                    return msgspec.structs.replace(wanted, environment={**made, **wanted.environment}), descriptors
                *streams, ends[pid] = descriptors
                for descriptor in streams:
                    os.close(descriptor)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)


def _say(end: int, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody waits
        os.write(end, number.to_bytes(STATUS_BYTES, "little"))


def _become(wanted: Wanted, descriptors: list[int]) -> None:
    """As `python -m MODULE ARGUMENTS` or `python SCRIPT ARGUMENTS`."""
    if wanted.session:
        os.setsid()
    elif wanted.group >= 0:
        os.setpgid(0, wanted.group)
    words = ["-m", wanted.module, *wanted.arguments] if wanted.module else wanted.arguments
    setproctitle.setproctitle(" ".join([sys.executable, *words]))
    for target, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, target)
    _say(descriptors[3], os.getpid())
    os.closerange(3, 1 << 16)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(wanted.environment)
    os.chdir(wanted.folder)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        before, unbuffered = getattr(sys, name), "PYTHONUNBUFFERED" in os.environ
        stream = os.fdopen(number, mode, encoding=before.encoding, errors=before.errors, closefd=False)
        by_line = not unbuffered and (name == "stderr" or stream.isatty())
        stream.reconfigure(line_buffering=by_line, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[1:] = [entry for entry in sys.path[1:] if entry not in inherited]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end = _ending()
    try:
        if wanted.module:
            sys.path[:1] = path if wanted.safe else [wanted.folder, *path]
            sys.argv = ["", *wanted.arguments]
            sys.modules.pop(wanted.module, None)
            runpy.run_module(wanted.module, run_name="__main__", alter_sys=True)
        else:
            sys.argv, script = list(wanted.arguments), wanted.arguments[0]
            sys.path[:1] = [os.path.dirname(os.path.realpath(script)), *path]
            main = {"__name__": "__main__", "__file__": os.path.abspath(script), "__builtins__": __builtins__}
            code, names = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), globals()
            names.clear()  # not `runpy`, which takes the script's names apart before the interpreter ends
            names.update(main, __spec__=None, __annotations__={})
            exec(code, names)
    except SystemExit as asked:
        if asked.code is None or isinstance(asked.code, int):
            end(asked.code or 0)
        raise
    end(0)


def _ending() -> Callable[[int], None]:
    """What ends an interpreter as ever, but does not take apart what modules made: a copy must write to every page for
    it, which takes half a second. It returns where a stream cannot be flushed, for the interpreter to say so, and needs
    no name of this file, whose names a script has replaced by then."""
    joined, exits, streams, leave = threading._shutdown, atexit._run_exitfuncs, sys, os._exit  # type: ignore[attr-defined]

    def end(status: int) -> None:
        joined()
        exits()
        try:
            streams.stdout.flush()
            streams.stderr.flush()
        except (OSError, ValueError):
            return
        leave(status & 0xFF)

    return end


if __name__ == "__main__":
    _become(*_serve())
