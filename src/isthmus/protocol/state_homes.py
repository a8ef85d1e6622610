"""Which node has which client's state, by the state's number, and what it takes to move one to another node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
NOWHERE = -1  # in place of a node, of a client that keeps nothing yet


@dataclass(frozen=True, eq=False, kw_only=True)
class StateHomes:
    """States are numbered file by file, and executors fill files in turn; a file stays on its node."""

    nodes: tuple[int, ...]  # the node of each executor. Executors that read the same folder are on one node.
    per_file: int  # states
    move_s: float = 0.0  # seconds of one state from node to node
    found: Mapping[int, int] = field(default_factory=dict)  # the node of each file that an earlier run left

    def of(self, states: NDArray[np.int32]) -> Integers:
        """(clients,) the node of each state."""
        files = states.astype(np.int64) // self.per_file
        homes = np.array(self.nodes, dtype=np.int64)[files % len(self.nodes)]
        if self.found:
            known = np.array(sorted(self.found), dtype=np.int64)
            at = np.minimum(np.searchsorted(known, files), len(known) - 1)
            nodes = np.array([self.found[file] for file in known.tolist()], dtype=np.int64)
            homes = np.where(known[at] == files, nodes[at], homes)
        return np.where(states < 0, NOWHERE, homes)

    def of_one(self, state: int) -> int:
        """The node of a state."""
        file = state // self.per_file
        return self.found.get(file, self.nodes[file % len(self.nodes)])

    def left_elsewhere(self, executor: int) -> NDArray[np.int32]:
        """States in files that this executor would fill, had an earlier run not left them on another node."""
        own = self.nodes[executor]
        files = [f for f, node in self.found.items() if f % len(self.nodes) == executor and node != own]
        states = [np.arange(file * self.per_file, (file + 1) * self.per_file) for file in files]
        return np.concatenate([np.empty(0, dtype=np.int64), *states]).astype(np.int32)
