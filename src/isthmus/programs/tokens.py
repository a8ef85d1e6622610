"""Generation by a chain of stages: which prompt runs when, and what happens when a device is lost.

    joining ──all here──► loading ──all loaded──► serving
       ▲                                             │
       └────────── a device is lost: plan anew ──────┘

A prompt that runs is one micro-batch: several are in flight at a time. Stages keep its keys and values. When a device
is lost, another chain is planned, all stages are loaded anew under the next epoch, and each prompt starts again from
its tokens so far: they fill the caches, and the next token is the one that would have followed.

A prompt may itself end the devices that compute it. So prompts start again one after the other, each when the one
before has its next token: the prompt that was tried when a second device is lost is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from isthmus.errors import IsthmusError, PeerError
from isthmus.protocol.generation import Prompt, PromptFailed, StageLoaded, StageUnable, TokenGenerated
from isthmus.session.program import JOINING, OVER, Event, OutOfPhase, Policy, Port, report
from isthmus.session.session import START_S, Loss, Observation, Session

RETRIES = 3
"""How often a chain is loaded again without a token in between, where a link broke and no device was lost. Then the
device that reported it is lost."""


class ServingPort(Port, Protocol):
    """The program's interface to its host."""

    def release(self, device: str) -> None:
        """The device may leave: nothing depends on it any more."""

    def plan(self, devices: Sequence[str]) -> Sequence[str]:
        """Return a chain of some of these devices. IsthmusError where there is none."""
        ...

    def load(self, chain: Sequence[str], epoch: int) -> None:
        """Give each device its stage."""

    def start(self, prompt: Prompt, made: Sequence[int]) -> None:
        """Give the first stage all tokens so far; `made` of them were generated."""

    def forget(self, number: int) -> None:
        """Let every stage drop the prompt's keys and values."""

    def deliver(self, number: int, token: int, *, last: bool) -> None: ...

    def refuse(self, number: int, reason: str, *, of_request: bool = False) -> None:
        """The prompt gets no further tokens. `of_request`: the fault is the request's own."""


class Tokens(Policy[ServingPort], Session):
    """The program of one service. Its members are the devices of the chain, the first stage first."""

    def __init__(
        self,
        port: ServingPort,
        chain: Sequence[str],
        fleet: Collection[str],
        *,
        at_once: int,
        vocabulary: int,
        timeout_s: float = 60.0,
    ) -> None:
        """`at_once`: prompts in flight; others wait in the order in which they came. Tokens are below `vocabulary`.
        `timeout_s`: as `Session`."""
        Policy.__init__(self, JOINING)
        Session.__init__(self, port.note, timeout_s=timeout_s, start_s=START_S)
        self.port = port
        self.epoch = 0
        self.members = tuple(chain)
        self.losses = 0  # members that were lost
        self._fleet = tuple(fleet)
        self._called = set(chain)
        self._out: set[str] = set()  # devices that were lost and are not back
        self._vocabulary = vocabulary
        self._at_once = at_once
        self._loaded: set[str] = set()
        self._running: dict[int, tuple[Prompt, list[int]]] = {}
        self._waiting: deque[Prompt] = deque()
        self._restarts: deque[int] = deque()
        """Prompts in flight when stages are loaded anew, which have not started again."""
        self._tried: int | None = None  # the one of them that has started and has no token since
        self._one_by_one = False  # whether a device was lost while prompts ran: one of them may have ended it
        self._retries = 0

    @property
    def usable(self) -> tuple[str, ...]:
        """Devices that may be members."""
        return tuple(name for name in self._fleet if name not in self._out)

    @property
    def expected(self) -> Collection[str]:
        return set(self.members) - self.connected if self.phase == JOINING else ()

    @property
    def concerned(self) -> Collection[str]:
        return self.usable

    def is_late(self, device: str, body: Event) -> bool:
        return body.epoch != self.epoch or device not in self.members

    # What users ask

    def submit(self, prompt: Prompt) -> None:
        if not self.over:
            self._waiting.append(prompt)
            self._admit()

    def cancel(self, number: int) -> None:
        if self.over:
            return
        self._waiting = deque(prompt for prompt in self._waiting if prompt.number != number)
        if self._running.pop(number, None) is None:
            return
        self._restarts = deque(other for other in self._restarts if other != number)
        if self._tried == number:
            self._tried = None
        self.port.forget(number)
        self._admit()

    def stop(self) -> None:
        """The end that was asked for."""
        self._end("")

    # What the host says

    def joined(self, device: str) -> None:
        self.connected.add(device)
        self._out.discard(device)
        if self.phase == JOINING:
            self._begin()

    def heard(self, device: str, body: msgspec.Struct) -> None:
        """Take a report. A member that says what it cannot have to say now is lost."""
        try:
            super().heard(device, body)
        except OutOfPhase as e:
            self.disbelieve(device, e)

    def lost(self, loss: Loss) -> None:
        device, reason = loss.device, loss.reason
        self.forget(device)
        self._out.add(device)
        self.port.reject(device, permanent=loss.permanent)
        if device not in self.members:
            return
        self.losses += 1
        self.epoch += 1
        if not self.usable:
            self._end(f"no device is left: {device}: {reason}")
            return
        try:
            self._go_on(device, reason)
        except IsthmusError as e:
            self._end(str(e))

    def looked(self, seen: Observation) -> None:
        super().looked(seen)
        if seen.leaving and not self.over:
            self._let_go(seen.leaving)

    def _let_go(self, leaving: frozenset[str]) -> None:
        """Go on without these devices, or with all members where the others are too few."""
        members, asked = self.members, sorted(leaving & (self.connected | set(self.members)))
        if not leaving.isdisjoint(members):
            try:
                members = tuple(self._choose([name for name in self.usable if name not in leaving]))
            except IsthmusError as e:
                for device in asked:
                    self.port.note(f"{device} was asked to leave and stays: {e}")
                return
            self.epoch += 1
        for device in asked:
            self.forget(device)
            self.port.release(device)
            self.port.note(f"{device} has left: it was asked to")
        self._out |= leaving
        if members is not self.members:
            self._rebuild(members)

    def _choose(self, devices: Sequence[str]) -> Sequence[str]:
        """Return a chain of these devices. IsthmusError where they are too few."""
        there = self.connected | self.seen.offers | self.seen.starting
        if not (usable := [name for name in devices if name in there]):
            raise PeerError("no device is left")
        return self.port.plan(usable)

    def _go_on(self, device: str, reason: str) -> None:
        """A member is lost: choose members again. The service ends where this raises IsthmusError."""
        if (refused := self._tried) is not None:
            self._tried = None
            del self._running[refused]
        count = len(self._running)
        go_on = "1 request goes on" if count == 1 else f"{count} requests go on"
        self.port.note(f"lost {device}: {reason}; {go_on} with other devices")
        self._one_by_one = True
        if refused is not None:
            text = f"a second device, {device}, was lost while the request's next token was computed: {reason}"
            self.port.refuse(refused, text)
        self._rebuild(self._choose(self.usable))

    def tries_again(self, device: str, reason: str) -> bool:
        self._retries += 1
        if self._retries > RETRIES:
            return False
        self.epoch += 1
        self.port.note(f"{device}: {reason}; loading the stages again")
        self._rebuild(self.members)
        return True

    def _rebuild(self, members: Sequence[str]) -> None:
        """Go on with these members under the present epoch. Those that were never called are called."""
        self.members, self.phase = tuple(members), JOINING
        for device in members:
            if device not in self._called:
                self._called.add(device)
                self.port.call(device)
        self._begin()

    def _begin(self) -> None:
        if self.connected.issuperset(self.members):
            self.phase = "loading"
            self._loaded.clear()
            self.port.load(self.members, self.epoch)

    def _end(self, reason: str) -> None:
        if not self.over:
            self.phase = OVER
            self.port.ended(reason)

    # What stages report

    @report(StageLoaded, "loading")
    def stage_loaded(self, device: str, body: StageLoaded) -> None:
        self._loaded.add(device)
        if self._loaded.issuperset(self.members):
            self.phase = "serving"
            self._restarts, self._tried = deque(self._running), None
            self._admit()

    @report(StageUnable, "loading", "serving")
    def stage_unable(self, device: str, body: StageUnable) -> None:
        self.failed(device, body.reason, "other")

    @report(TokenGenerated, "serving")
    def token(self, device: str, body: TokenGenerated) -> None:
        """OutOfPhase for what no honest last stage sends."""
        self._check_last(device)
        if body.token >= self._vocabulary:
            raise OutOfPhase(f"sent token {body.token}, the model has 0 to {self._vocabulary - 1}")
        if (found := self._running.get(body.prompt)) is None or body.place != len(found[1]):
            return  # the prompt was cancelled
        prompt, made = found
        if body.place >= prompt.sampling.max_tokens:
            raise OutOfPhase(f"sent token {body.place + 1} of a request for {prompt.sampling.max_tokens}")
        made.append(body.token)
        self._retries = 0
        if body.prompt == self._tried:
            self._tried = None
        self.port.deliver(body.prompt, body.token, last=body.last)
        if body.last:
            self.cancel(body.prompt)
        else:
            self._admit()

    @report(PromptFailed, "serving")
    def prompt_failed(self, device: str, body: PromptFailed) -> None:
        self._check_last(device)
        self.port.refuse(body.prompt, body.reason, of_request=body.of_request)
        self.cancel(body.prompt)

    def _check_last(self, device: str) -> None:
        if device != self.members[-1]:
            raise OutOfPhase("sent a request's token, which is for the last stage to send")

    def _admit(self) -> None:
        """Start what may start now."""
        if self.phase != "serving" or self._tried is not None:
            return
        while self._restarts:
            prompt, made = self._running[number := self._restarts.popleft()]
            self.port.start(prompt, tuple(made))
            if self._one_by_one:
                self._tried = number
                return
        self._one_by_one = False
        while self._waiting and len(self._running) < self._at_once:
            prompt = self._waiting.popleft()
            self._running[prompt.number] = (prompt, [])
            self.port.start(prompt, ())
