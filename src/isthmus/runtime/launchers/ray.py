"""Agents on the nodes of a Ray cluster: an actor for each, whose only work is to run `isthmus join`.

A placement group reserves the nodes (STRICT_SPREAD: each of its bundles is on a node of its own; SPREAD where agents
share nodes). Ray moves a bundle whose node died to another node, as soon as there is one. Nothing is detached: where
this process dies, Ray ends it all.

The part of Ray's engine that runs on a node: an actor with an agent as its child process.

Ray may kill an actor with its children at any moment, as where its driver died. The agent's folder, which holds a key,
is then removed by a shell that waits for that: it is nobody's child.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from isthmus.errors import PeerError
from isthmus.runtime.launchers.child_agents import GRACE_S, ChildAgents
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState, agent_command
from isthmus.runtime.launchers.ray_connection import LAUNCHER, RayUser, connect, ray_library

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

END_S = 2 * GRACE_S  # for the actors to end their agents, before they are killed


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of a Ray cluster. This machine is one of them."""

    address: str = ""
    """HOST:PORT of its head; by default RAY_ADDRESS, or else the cluster that was started on this machine."""
    cpus: Annotated[float, Meta(gt=0)] = 1.0
    """CPUs that Ray reserves for each agent; a node with fewer is not used. The agent may use all."""
    gpus: Annotated[float, Meta(ge=0)] | None = None
    """GPUs, or the share of one, that Ray reserves for each agent; it sees no others, and a node has as many agents as
    there is room for. None: one agent for each node, with all GPUs of it."""


class RayLauncher:
    """A `Launcher`. Agents import modules also from the folder where this process runs, as they find it on their
    node."""

    restarts = True

    def __init__(self, options: RayOptions, user: RayUser = LAUNCHER) -> None:
        """`user` is named in errors."""
        self._options, self._user = options, user
        self._connected = False  # whether this object connected to Ray, and disconnects at the end
        self._group: PlacementGroup | None = None
        self._bundles: dict[str, tuple[int, float]] = {}  # the number and the GPUs of each agent, by name
        self._agents: dict[str, _ActorHere] = {}
        self._log: Callable[[str, str], None] = lambda name, line: None

    @property
    def head(self) -> str:
        """This machine's address as Ray's nodes know it."""
        return str(ray_library().util.get_node_ip_address())

    def check(self) -> None:
        """This process becomes a driver of the cluster, unless it is one."""
        self._connected = connect(self._options.address, self._user) or self._connected

    def nodes(self) -> int:
        """How many agents there is room for."""
        return len(self._gpus())

    def start(self, agents: Sequence[AgentSpec], folder: Path, log: Callable[[str, str], None]) -> None:
        """Nothing is kept in the folder."""
        gpus, cpus, shared = self._gpus(), self._options.cpus, self._options.gpus is not None
        if len(gpus) < len(agents):
            room = "places" if shared else "nodes"
            raise PeerError(f"Ray has {len(gpus)} {room} with {cpus:g} or more CPUs, expected {len(agents)}")
        self._log = log
        bundles = [{"CPU": cpus, **({"GPU": count} if count else {})} for count in gpus[: len(agents)]]
        strategy = "SPREAD" if shared else "STRICT_SPREAD"
        self._group = ray_library().util.placement_group(bundles, strategy=strategy)
        for number, agent in enumerate(agents):
            self._bundles[agent.name] = (number, gpus[number])
            self.restart(agent)

    def states(self) -> Mapping[str, AgentState]:
        return {name: agent.state for name, agent in self._agents.items()}

    def restart(self, agent: AgentSpec) -> None:
        """In the same bundle, wherever that is by then."""
        ray, (number, gpus) = ray_library(), self._bundles[agent.name]
        made = ray.remote(RayActor).options(
            num_cpus=self._options.cpus,
            num_gpus=gpus,
            max_concurrency=2,
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, number),
        )
        self._agents[agent.name] = _ActorHere(made.remote(os.getcwd()), agent, self._log)

    def stop(self) -> None:
        ray = ray_library()
        agents, self._agents = list(self._agents.values()), {}
        with contextlib.suppress(ray.exceptions.RayError):
            ending = [agent.end() for agent in agents if agent.state is AgentState.RUNNING]
            if ending:
                ray.wait(ending, num_returns=len(ending), timeout=END_S)
        for agent in agents:
            agent.kill()
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(group)
        if self._connected:
            self._connected = False
            ray.shutdown()

    def _gpus(self) -> list[float]:
        """Return the GPUs of each agent that the nodes which are alive have room for; the most first."""
        cpus, gpus = self._options.cpus, self._options.gpus
        alive = [node["Resources"] for node in ray_library().nodes() if node["Alive"]]
        if gpus is None:
            return sorted((has.get("GPU", 0.0) for has in alive if has.get("CPU", 0.0) >= cpus), reverse=True)
        rooms = [_times(has.get("CPU", 0.0), cpus) for has in alive]
        if gpus:
            rooms = [min(room, _times(has.get("GPU", 0.0), gpus)) for room, has in zip(rooms, alive, strict=True)]
        return [gpus] * sum(rooms)


def _times(has: float, share: float) -> int:
    return int(has / share + 1e-9)


class _ActorHere:
    """An actor as its driver sees it. A thread waits for what it yields."""

    def __init__(self, actor: ActorHandle[RayActor], agent: AgentSpec, log: Callable[[str, str], None]) -> None:
        """The ticket is an argument of a call, so it is no part of what Ray shows or logs."""
        self.state = AgentState.QUEUED
        self._actor = actor
        found = actor.run.options(num_returns="streaming").remote(agent)
        self._thread = threading.Thread(target=self._read, args=(found, agent.name, log), name="agent", daemon=True)
        self._thread.start()

    def _read(self, found: Iterable[ObjectRef[str | AgentState]], name: str, log: Callable[[str, str], None]) -> None:
        ray = ray_library()
        try:
            for one in found:
                item = ray.get(one)
                if isinstance(item, str):
                    self.state = AgentState.RUNNING
                    log(name, item)
                else:
                    self.state = item
        except Exception as e:  # of any kind: nobody else hears of the agent
            self.state = AgentState.LOST
            log(name, " ".join(str(e).split()))
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)

    def end(self) -> ObjectRef[None]:
        return self._actor.end.remote()

    def kill(self) -> None:
        ray = ray_library()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)
        self._thread.join(GRACE_S)


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
"""  # once standard input closes. Device processes take a moment to end, and may still write.


class RayActor:
    """`end` is called while `run` runs."""

    def __init__(self, folder: str) -> None:
        """Agents import modules from `folder` too."""
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
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
