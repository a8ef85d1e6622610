"""Processes of agents, found by what their command lines hold."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def command_lines() -> dict[int, list[str]]:
    """Of all processes of this machine, by pid."""
    found: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[int(path.parent.name)] = path.read_bytes().decode(errors="replace").replace("\0", " ").split()
    return found


def processes_with(text: str) -> dict[int, list[str]]:
    """Those whose command line holds the text, but for this process."""
    return {pid: line for pid, line in command_lines().items() if text in " ".join(line) and pid != os.getpid()}


def kill_agent(name: str) -> None:
    """At once, as when its machine loses power."""
    agents = {pid: line for pid, line in processes_with(name).items() if "join" in line and "-c" not in line}
    pids = [pid for pid, line in agents.items() if line[line.index("--name") + 1] == name]
    assert pids, f"no agent {name}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
