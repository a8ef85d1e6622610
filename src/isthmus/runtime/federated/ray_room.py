"""How many executors a Ray cluster holds."""

from __future__ import annotations

from isthmus.errors import UserError
from isthmus.federated.runtime import RayRuntime
from isthmus.runtime.launchers.ray_connection import RayUser, connect, ray_library

USER = RayUser("runtime.backend", "runtime.ray.address")


def cluster_room(options: RayRuntime) -> int:
    """Return how many executors the job's cluster has room for. UserError where Ray is missing, too old or cannot be
    reached, or has room for none."""
    connected = connect(options.address, USER)
    try:
        if not (room := room_for(options)):
            raise UserError(
                f"runtime.ray: got {share_text(options)} for each executor: no node of the cluster has them"
            )
        return room
    finally:
        if connected:
            ray_library().shutdown()


def room_for(options: RayRuntime) -> int:
    """Return how many executors the cluster that this process is connected to has room for, at most."""
    nodes = [node["Resources"] for node in ray_library().nodes() if node["Alive"]]
    rooms = [_times(has.get("CPU", 0.0), options.cpus) for has in nodes]
    if options.gpus:
        rooms = [min(room, _times(has.get("GPU", 0.0), options.gpus)) for room, has in zip(rooms, nodes, strict=True)]
    return sum(rooms)


def share_text(options: RayRuntime) -> str:
    """Return the resources that each executor reserves, as text."""
    return f"cpus = {options.cpus:g}, gpus = {options.gpus:g}"


def _times(has: float, share: float) -> int:
    return int(has / share + 1e-9)
