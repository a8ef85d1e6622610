"""A run's executors as actors of a Ray cluster, spread over its nodes by a placement group. No cluster is started here.

Nothing is detached: where this process dies, Ray ends the actors and removes the group.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from isthmus.errors import PeerError, UserError
from isthmus.federated.job import FederatedJob, RayExecution
from isthmus.runtime.federated.ray_actor import ActorSetup, ExecutorActor
from isthmus.runtime.federated.ray_channel import RayBroadcast, RayChannel
from isthmus.runtime.launchers.ray_connection import RayUser, connect, ray_library
from isthmus.runtime.transport.channel import MessageChannel

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

USER = RayUser("execution.engine", "execution.ray.address")
JOIN_S = 5.0
"""For threads that receive from actors that were killed."""


class RayExecutors:
    """A context manager: on exit the actors are killed, and the group is removed."""

    def __init__(self, job: FederatedJob, setups: Mapping[str, ActorSetup]) -> None:
        """UserError where Ray is missing, too old or cannot be reached, or has no room."""
        self._options = job.execution.ray
        self._timeout_s = job.timeout_s
        self._connected = connect(self._options.address, USER)
        self._group: PlacementGroup | None = None
        self._channels: dict[str, RayChannel] = {}
        self._threads: list[threading.Thread] = []
        try:
            self._start(setups)
        except BaseException:
            self._end()
            raise

    def _start(self, setups: Mapping[str, ActorSetup]) -> None:
        ray, options = ray_library(), self._options
        if (room := room_for(options)) < len(setups):
            raise UserError(
                f"execution.executors: got {len(setups)}, expected at most {room}: so many with "
                f"{_share(options)} each fit on the Ray cluster"
            )
        bundle = {"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}
        self._group = group = ray.util.placement_group([bundle] * len(setups), strategy="SPREAD")
        if not group.wait(self._timeout_s):
            what = f"{len(setups)} executors with {_share(options)} each"
            raise PeerError(f"Ray has not reserved {what} within {self._timeout_s:g} s: others use the cluster")
        broadcast = RayBroadcast()
        for number, (name, setup) in enumerate(setups.items()):
            actor = ray.remote(ExecutorActor).options(
                num_cpus=options.cpus,
                num_gpus=options.gpus,
                max_concurrency=2,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, number),
            )
            self._channels[name] = RayChannel(
                f"device {name!r}", actor.remote(), msgspec.msgpack.encode(setup), broadcast
            )

    def begin(self, on_connection: Callable[[MessageChannel], None]) -> None:
        """Hand the actors' channels on, each in a thread."""
        for name, channel in self._channels.items():
            thread = threading.Thread(target=on_connection, args=(channel,), name=f"receive from {name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def ended(self) -> dict[str, str]:
        """The executors that were lost, and how."""
        return {name: channel.lost for name, channel in self._channels.items() if channel.lost is not None}

    def __enter__(self) -> RayExecutors:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        ray = ray_library()
        for channel in self._channels.values():
            channel.close()
        for thread in self._threads:
            thread.join(JOIN_S)
        if self._group is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(self._group)
        if self._connected:
            ray.shutdown()


def room_for(options: RayExecution) -> int:
    """How many executors the cluster that this process is connected to holds at most."""
    rooms = [node["Resources"] for node in ray_library().nodes() if node["Alive"]]
    per_node = [_times(has.get("CPU", 0.0), options.cpus) for has in rooms]
    if options.gpus:
        per_node = [min(n, _times(has.get("GPU", 0.0), options.gpus)) for n, has in zip(per_node, rooms, strict=True)]
    return sum(per_node)


def _times(has: float, share: float) -> int:
    return int(has / share + 1e-9)


def _share(options: RayExecution) -> str:
    return f"{options.cpus:g} CPUs" + (f" and {options.gpus:g} GPUs" if options.gpus else "")


def states_folder(job: FederatedJob, folder: Path) -> str:
    """As a node reads it."""
    return job.execution.ray.states or str(folder.resolve() / "states")
