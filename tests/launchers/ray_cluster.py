"""A Ray cluster on this machine's loopback addresses: its nodes are processes of this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ray._private.node import Node
from ray.cluster_utils import Cluster

NODE = {
    "num_cpus": 1,
    "object_store_memory": 80 << 20,
    "node_ip_address": "127.0.0.1",
    "include_log_monitor": False,
}
VARIABLES = ("RAY_TMPDIR", "TMPDIR")
SETTINGS = {
    "prestart_worker_first_driver": False,
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}
"""A killed node is known to be dead within seconds, and no interpreter starts that no actor is for."""


class RayCluster:
    """A context manager."""

    def __init__(self, nodes: int = 3, **resources: float) -> None:
        """`resources` are those that each node says it has."""
        self._nodes = nodes
        self._node = {**NODE, **resources}
        self._cluster = Cluster(shutdown_at_exit=True)
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        """Its path is short: sockets are in it."""
        self._workers: list[Node] = []

    def __enter__(self) -> RayCluster:
        # There Ray notes which cluster this machine has, and agents have their folders.
        os.environ.update(dict.fromkeys(VARIABLES, str(self.folder)))
        self._cluster.add_node(
            **self._node,
            include_dashboard=False,
            no_monitor=True,
            _system_config=SETTINGS,
        )
        for _ in range(1, self._nodes):
            self.add_node()
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()
        for name in VARIABLES:
            del os.environ[name]
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def address(self) -> str:
        return self._cluster.address

    def add_node(self) -> None:
        self._workers.append(self._cluster.add_node(**self._node))

    def kill_node(self, number: int = 0) -> None:
        """One that is not the head, with all its processes, as when its machine loses power."""
        self._cluster.remove_node(self._workers.pop(number), allow_graceful=False)

    def groups(self) -> list[str]:
        """States of the placement groups that are not removed."""
        found = self._cluster.global_state.placement_group_table().values()
        return [group["state"] for group in found if group["state"] != "REMOVED"]

    def actors(self) -> list[str]:
        """States of the actors that are not dead."""
        found = self._cluster.global_state.actor_table(None).values()
        return [actor["State"] for actor in found if actor["State"] != "DEAD"]

    def pids(self) -> list[int]:
        """Of the actors that are alive."""
        found = self._cluster.global_state.actor_table(None).values()
        return [actor["Pid"] for actor in found if actor["State"] == "ALIVE"]

    def folders(self) -> list[Path]:
        """Of agents."""
        return list(self.folder.glob("isthmus-agent-*"))
