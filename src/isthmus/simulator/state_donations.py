"""Joining devices get the state of the run while the others train: a copy, then each step's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from isthmus.protocol.run_messages import SendState, StateReceived, TransferEnded
from isthmus.simulator.connections import Connections
from isthmus.simulator.device import SimulatedWorker
from isthmus.simulator.history import State
from isthmus.simulator.world import World

MOST_BACKLOG = 2.0
"""Copies of the state that may be on their way; with more, steps are quicker than their gradients travel."""


class _Donation(NamedTuple):
    asked: SendState
    donor: SimulatedWorker
    copy_s: float  # that the copy takes, and a third of it each step's gradients


class StateDonations:
    """The coordinator passes on what donors send; it takes as long as both lines take."""

    def __init__(self, world: World, connections: Connections[SimulatedWorker]) -> None:
        self._world = world
        self._connections = connections
        self._receivers: dict[str, list[tuple[str, frozenset[str]]]] = {}
        """Joining devices that get state from each donor, and of which parts."""
        self._donations: dict[str, _Donation] = {}
        self._through_s: dict[str, float] = {}  # seconds at which all that each donor has sent so far has arrived

    def clear(self) -> None:
        self._receivers.clear()
        self._donations.clear()
        self._through_s.clear()

    def receive(self, device: str, donated: Mapping[str, frozenset[str]]) -> None:
        for donor, parts in donated.items():
            self._receivers.setdefault(donor, []).append((device, parts))

    def send(self, asked: SendState, donor: SimulatedWorker) -> None:
        """The donor hears of it."""
        if not asked.parts:
            self._donations.pop(donor.name, None)
            self._receivers.pop(donor.name, None)
            return
        if donor.machine is None or donor.session.epoch != asked.epoch:
            return
        copy_s = self._world.copy_s(donor)
        self._donations[donor.name] = donation = _Donation(asked, donor, copy_s)
        self._through_s[donor.name] = self._world.clock.now_s
        if donor.step == asked.step:
            self._give(donation, copy_s)

    def stepped(self, donor: SimulatedWorker) -> None:
        """It has done one more step."""
        donation = self._donations.get(donor.name)
        if donation is None or donation.donor is not donor or donor.step < donation.asked.step:
            return
        first = donor.step == donation.asked.step
        if self._through_s[donor.name] - self._world.clock.now_s > MOST_BACKLOG * donation.copy_s > 0.0:
            del self._donations[donor.name]
            ended = TransferEnded(number=donation.asked.number, epoch=donation.asked.epoch)
            self._world.say(donor, ended)
            return
        self._give(donation, donation.copy_s if first else donation.copy_s / 3)

    def _give(self, donation: _Donation, seconds: float) -> None:
        donor, asked = donation.donor, donation.asked
        now_s = self._world.clock.now_s
        self._through_s[donor.name] = max(self._through_s[donor.name], now_s) + seconds
        state, step = donor.state_after(donor.step, asked.parts), donor.step
        for device, parts in self._receivers.get(donor.name, ()):
            values = {part: value for part, value in state.items() if part in parts}
            arrive = partial(self._arrive, donation, device, step, values)
            self._world.later(self._through_s[donor.name] - now_s, ("follow", device, donor.name), arrive)

    def _arrive(self, donation: _Donation, device: str, step: int, values: State) -> None:
        asked, donor = donation.asked, donation.donor.name
        joiner = self._world.worker(device)
        if joiner is None:
            return

        def received() -> None:
            joiner.session.kept(asked.epoch, step, values)
            told = StateReceived(of=donor, step=step, number=asked.number, epoch=asked.epoch)
            self._world.say(joiner, told)

        self._world.on(joiner.device, received)
