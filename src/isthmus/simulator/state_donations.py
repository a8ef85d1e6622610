"""Joining devices get the state of the run while the others train: a copy, then each step's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from isthmus.plans.plan import device_of
from isthmus.protocol.run_messages import SendState, StateReceived, TransferEnded
from isthmus.simulator.connections import Connections
from isthmus.simulator.device import SimulatedWorker
from isthmus.simulator.history import State
from isthmus.simulator.world import World

MOST_BACKLOG = 2.0
"""Copies of the state that may be on their way; with more, steps are quicker than their gradients travel."""


GRADIENTS_SHARE = 1 / 3  # bytes of a step's gradients, as a share of those of the state with Adam


class _Donation(NamedTuple):
    asked: SendState
    donor: SimulatedWorker


class StateDonations:
    """State goes over the links from donors to joining devices."""

    def __init__(self, world: World, connections: Connections[SimulatedWorker]) -> None:
        self._world = world
        self._connections = connections
        self._receivers: dict[str, list[tuple[str, frozenset[str]]]] = {}
        """Joining devices that get state from each donor, and of which parts."""
        self._donations: dict[str, _Donation] = {}
        self._through_s: dict[str, float] = {}  # seconds at which all that each donor has sent so far has arrived
        self._copy_s: dict[str, float] = {}  # seconds that the first copy of each donor's state takes

    def clear(self) -> None:
        self._receivers.clear()
        self._donations.clear()
        self._through_s.clear()
        self._copy_s.clear()

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
        self._donations[donor.name] = donation = _Donation(asked, donor)
        if donor.step == asked.step:
            self._give(donation, 1.0)

    def stepped(self, donor: SimulatedWorker) -> None:
        """It has done one more step."""
        donation = self._donations.get(donor.name)
        if donation is None or donation.donor is not donor or donor.step < donation.asked.step:
            return
        first = donor.step == donation.asked.step
        now_s = self._world.clock.now_s
        if not first and self._through_s[donor.name] - now_s > MOST_BACKLOG * self._copy_s[donor.name]:
            del self._donations[donor.name]
            ended = TransferEnded(number=donation.asked.number, epoch=donation.asked.epoch)
            self._world.say(donor, ended)
            return
        self._give(donation, 1.0 if first else GRADIENTS_SHARE)

    def _give(self, donation: _Donation, share: float) -> None:
        """`share`: of the bytes of the state."""
        donor, asked = donation.donor, donation.asked
        now_s = through_s = self._world.clock.now_s
        state, step = donor.state_after(donor.step, asked.parts), donor.step
        for device, parts in self._receivers.get(donor.name, ()):
            values = {part: value for part, value in state.items() if part in parts}
            arrived_s = self._world.state_arrives_s(donor, device_of(device), values, share)
            if arrived_s is None:
                timeout_s = self._world.timeout_s
                self._world.later(timeout_s, ("follow", device, donor.name), partial(self._lose, donation, device))
                continue
            through_s = max(through_s, arrived_s)
            arrive = partial(self._arrive, donation, device, step, values)
            self._world.clock.at(arrived_s, ("follow", device, donor.name), arrive)
        self._through_s[donor.name] = through_s
        self._copy_s.setdefault(donor.name, through_s - now_s)

    def _lose(self, donation: _Donation, device: str) -> None:
        """Nothing comes any more."""
        if (joiner := self._world.worker(device)) is not None:
            ended = TransferEnded(number=donation.asked.number, epoch=donation.asked.epoch)
            self._world.on(joiner.device, lambda: self._world.say(joiner, ended))

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
