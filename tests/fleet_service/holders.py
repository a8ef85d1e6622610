"""Devices of a fleet that have data of their own, in folders that nobody else reads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from isthmus.data import DataSpec
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service.agent import Agent, join_fleet

from .parties import Fleet, outcomes, soon

SPEC = DataSpec(kind="npz", options={"path": "samples.npz", "holdout": 0.25})


def write_samples(folder: Path, seed: int = 0, count: int = 40, width: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(seed)
    pixels = drawn.standard_normal((count, width), dtype=np.float32)
    np.savez(folder / "samples.npz", pixel_values=pixels, labels=drawn.integers(0, 3, count))
    return folder


class Joined:
    """Devices of a fleet, each with a folder of its own."""

    def __init__(self, fleet: Fleet, root: Path) -> None:
        self.fleet, self._root = fleet, root
        self.said: list[str] = []
        self._agents: dict[str, tuple[Agent, threading.Thread]] = {}

    def add(
        self, name: str, data: Path | None, kinds: tuple[str, ...] | None = None, prefix: tuple[str, ...] = ()
    ) -> None:
        membership = join_fleet(self.fleet.ticket(), {name: self._root / name}, 10.0)[name]
        place = ProcessPlace(data=data, data_kinds=kinds, prefix=prefix)
        agent = Agent(self._root / name, membership, place, timeout_s=10.0, log=self.said.append)
        thread = threading.Thread(target=outcomes, args=(agent.run,), daemon=True)
        self._agents[name] = (agent, thread)
        thread.start()
        soon(lambda: name in self.fleet.service.present)

    def remove(self, name: str) -> None:
        """Its machine is lost, or so it seems to the others."""
        agent, thread = self._agents.pop(name)
        agent.stop()
        thread.join(60)
        assert not thread.is_alive()

    def end(self) -> None:
        for agent, _ in self._agents.values():
            agent.stop()
        for name in list(self._agents):
            self.remove(name)
