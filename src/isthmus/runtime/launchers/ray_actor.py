"""The part of Ray's engine that runs on a node: an actor with an agent as its child process.

Ray may kill an actor with its children at any moment, as where its driver died. The agent's folder, which holds a key,
is then removed by a shell that waits for that: it is nobody's child.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

from isthmus.runtime.launchers.agent_command import agent_command
from isthmus.runtime.launchers.child_agents import GRACE_S, ChildAgents
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState
from isthmus.runtime.launchers.ray_connection import ray_library

LOOK_S = 0.2
REMOVE = """
exec 3<&0
(
  cat <&3
  for second in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
    rm -rf -- "$1" && test ! -e "$1" && exit
    sleep 1
  done
) >/dev/null 2>&1 &
"""
"""Once standard input closes. Device processes take a moment to end, and may still write."""


class RayActor:
    """`end` is called while `run` runs."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._agents = ChildAgents(lambda name, line: self._lines.put(line))
        self._over = threading.Event()

    def run(self, agent: AgentSpec) -> Generator[str | AgentState]:
        """Run the agent; yield the lines that it prints, and at last its state."""
        with _folder() as folder:
            self._agents.start(agent, agent_command(agent, sys.executable, "--state", str(folder), "--attached"))
            yield f"on node {ray_library().util.get_node_ip_address()}"
            while (state := self._agents.states().get(agent.name, AgentState.ENDED)) is AgentState.RUNNING:
                with contextlib.suppress(queue.Empty):
                    yield self._lines.get(timeout=LOOK_S)
            self._agents.stop()
            while not self._lines.empty():
                yield self._lines.get()
        self._over.set()
        yield state

    def end(self) -> None:
        """On return the agent has ended, and its folder is removed."""
        self._agents.stop()
        self._over.wait(GRACE_S)


@contextlib.contextmanager
def _folder() -> Generator[Path]:
    """Removed afterwards, also where this process is killed."""
    folder = Path(tempfile.mkdtemp(prefix="isthmus-agent-"))
    remover = subprocess.Popen(["sh", "-c", REMOVE, "sh", str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    remover.wait()
    assert remover.stdin is not None, "asked for"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        remover.stdin.close()
