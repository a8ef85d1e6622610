"""A run's executors as actors of a Ray cluster, spread over its nodes by a placement group. No cluster is started here.

Nothing is detached: where this process dies, Ray ends the actors and removes the group.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from isthmus.errors import PeerError, UserError
from isthmus.federated.job import FederatedJob
from isthmus.federated.state_files import StateFiles
from isthmus.federated.state_form import StateForm
from isthmus.protocol.state_homes import StateHomes
from isthmus.runtime.federated.node_states import NodeView, state_homes
from isthmus.runtime.federated.ray_actor import ActorSetup, ExecutorActor
from isthmus.runtime.federated.ray_channel import RayBroadcast, RayChannel, lost_by
from isthmus.runtime.federated.ray_room import USER, room_for, share_text
from isthmus.runtime.launchers.ray_connection import connect, ray_library
from isthmus.runtime.transport.channel import MessageChannel

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

START_S = 300.0  # for an actor's process to import torch from a slow disk
CALLS = 4  # at once of an actor: `run`, `deliver`, and others' for states
JOIN_S = 5.0  # for threads that receive from actors that were killed


class RayExecutors:
    """A context manager: on exit the actors are killed, and the group is removed."""

    def __init__(self, job: FederatedJob, setups: Sequence[ActorSetup], state: StateForm | None) -> None:
        """`state` is the form of what clients keep. UserError where Ray is missing, too old or cannot be reached, or
        has no room; PeerError for an actor that does not start."""
        self._options = job.runtime.ray
        self._timeout_s = job.timeout_s
        self._names = [setup.name for setup in setups]
        self._connected = connect(self._options.address, USER)
        self._group: PlacementGroup | None = None
        self._actors: list[ActorHandle[ExecutorActor]] = []
        self._channels: list[RayChannel] = []
        self._threads: list[threading.Thread] = []
        self.homes: StateHomes | None = None
        """Where the states are on several nodes."""
        try:
            self._start(setups)
            if state is not None:
                self.homes = self._look_at_states(state)
        except BaseException:
            self._end()
            raise

    def _start(self, setups: Sequence[ActorSetup]) -> None:
        ray, options = ray_library(), self._options
        if (room := room_for(options)) < len(setups):
            raise UserError(
                f"runtime.executors: got {len(setups)}, expected at most {room}: so many with {share_text(options)} "
                "each fit on the Ray cluster"
            )
        bundle = {"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}
        self._group = group = ray.util.placement_group([bundle] * len(setups), strategy="SPREAD")
        if not group.wait(self._timeout_s):
            what = f"{len(setups)} executors with {share_text(options)}"
            raise PeerError(f"Ray has not reserved {what} within {self._timeout_s:g} s: others use the cluster")
        for number, setup in enumerate(setups):
            actor = ray.remote(ExecutorActor).options(
                num_cpus=options.cpus,
                num_gpus=options.gpus,
                max_concurrency=CALLS,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, number),
            )
            self._actors.append(actor.remote(msgspec.msgpack.encode(setup)))
        self._all("ready")

    def _all(self, method: str, *arguments: object) -> list[object]:
        """Call a method of all actors; return its results."""
        ray = ray_library()
        calls = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        found: list[object] = []
        for name, call in zip(self._names, calls, strict=True):
            try:
                found.append(ray.get(call, timeout=START_S))
            except ray.exceptions.GetTimeoutError:
                raise PeerError(f"executor {name!r}: its actor has not started within {START_S:g} s") from None
            except ray.exceptions.RayTaskError as e:
                if isinstance(e.cause, UserError):
                    raise UserError(str(e.cause)) from None
                raise PeerError(f"executor {name!r}: {lost_by(e)}") from None
            except ray.exceptions.RayError as e:
                raise PeerError(f"executor {name!r}: {lost_by(e)}") from None
        return found

    def _look_at_states(self, form: StateForm) -> StateHomes | None:
        self._all("open_states", form.size_bytes)
        views = [NodeView(*view) for view in cast("list[NodeView]", self._all("view_states"))]
        per_file = StateFiles("", form.size_bytes, direct=False).per_file
        return state_homes(self._names, views, per_file, form.size_bytes / self._options.bandwidth_bytes_s)

    @property
    def moved_bytes(self) -> int:
        """Bytes of clients' states that moved to another node."""
        return sum(channel.moved_bytes for channel in self._channels)

    def begin(self, on_connection: Callable[[MessageChannel], None]) -> None:
        """Hand the actors' channels on, each in a thread."""
        broadcast = RayBroadcast()
        for name, actor in zip(self._names, self._actors, strict=True):
            channel = RayChannel(f"device {name!r}", actor, broadcast, self.homes, self._actors)
            self._channels.append(channel)
            thread = threading.Thread(target=on_connection, args=(channel,), name=f"receive from {name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def ended(self) -> dict[str, str]:
        """The executors that were lost, and how."""
        return {
            name: channel.lost
            for name, channel in zip(self._names, self._channels, strict=True)
            if channel.lost is not None
        }

    def __enter__(self) -> RayExecutors:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        ray = ray_library()
        for channel in self._channels:
            channel.close()
        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
        for thread in self._threads:
            thread.join(JOIN_S)
        if self._group is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(self._group)
        if self._connected:
            ray.shutdown()


def states_folder(job: FederatedJob, folder: Path) -> str:
    """Return the folder as a node reads it."""
    return job.runtime.ray.states or str(folder.resolve() / "states")
