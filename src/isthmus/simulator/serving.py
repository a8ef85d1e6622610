"""A simulated service that generates text: the program of a real one (`programs/tokens.py`), on a virtual clock.

A stage computes the tokens of one step at a time. What crosses to the next stage takes the link's time; the last stage
tells the coordinator each token, and gives it to the first. Without faults and with one request in flight, a token
takes exactly `Chain.token_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from isthmus.combinations import refused
from isthmus.errors import PeerError, UserError
from isthmus.planners.generation import FRAME_BYTES, Chain, ServingProblem
from isthmus.programs.tokens import Tokens
from isthmus.protocol.generation import Prompt, Sampling, StageLoaded, StageReport, StageUnable, TokenGenerated
from isthmus.simulator.options import (
    Fault,
    SimulationOptions,
    WithoutEffect,
    without_effect_document,
    without_effect_lines,
)
from isthmus.simulator.parties import Connections, LinkedParties, Party, SimulatedHost, Strikes
from isthmus.units import format_duration

MOST_S = 1e6  # a simulated service that has not answered by then never does


def check_serving_faults(faults: Iterable[Fault]) -> None:
    """UserError for a fault that no service goes on after."""
    for fault in faults:
        if fault.kind == "coordinator":
            raise refused("a lost coordinator", "generation", "the coordinator")


class ServedRequest(NamedTuple):
    """A request to a simulated service."""

    prompt: int  # tokens of its prompt
    new: int  # tokens that it asks for
    arrives_s: float = 0.0


class SimulatedAnswer(NamedTuple):
    token_s: tuple[float, ...]  # seconds at which each token came
    refused: str = ""  # why there are no more

    def described(self) -> str:
        count, ended = len(self.token_s), f"; then none: {self.refused}" if self.refused else ""
        if not count:
            return f"no token{ended}"
        longest_s = max((b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)), default=0.0)
        first, last, longest = map(format_duration, (self.token_s[0], self.token_s[-1], longest_s))
        if count == 1:
            return f"1 token after {first}{ended}"
        return f"{count} tokens, the first after {first}, the last after {last}, at most {longest} between two{ended}"


class SimulatedServing(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a simulated service: answers in the order of the requests."""

    answers: tuple[SimulatedAnswer, ...]
    notes: tuple[tuple[float, str], ...]
    losses: int  # devices that were lost
    chain: Chain  # the last one
    without_effect: WithoutEffect = ()

    def check(self) -> None:
        """PeerError where an answer was refused."""
        if refused := next((answer.refused for answer in self.answers if answer.refused), ""):
            raise PeerError(refused)

    @property
    def tokens_per_s(self) -> float:
        """All answers' tokens by the time until the last one."""
        times_s = [time_s for answer in self.answers for time_s in answer.token_s]
        return len(times_s) / max(times_s) if times_s else 0.0

    def document(self) -> dict[str, object]:
        answers = [{"token_s": answer.token_s, "failure": answer.refused or None} for answer in self.answers]
        without = without_effect_document(self.without_effect)
        found = {**msgspec.structs.asdict(self), "answers": answers, "without_effect": without}
        return {**found, "tokens_per_s": self.tokens_per_s}

    def without_effect_lines(self) -> list[str]:
        return without_effect_lines(self.without_effect)


class _Chain(NamedTuple):
    epoch: int
    devices: tuple[str, ...]
    stage_s: tuple[float, ...]  # seconds of each stage for one token
    crossing_bytes: tuple[int, ...]  # bytes for one token from each stage to the next


class _Stage:
    """A device's process, and the stage that it has."""

    def __init__(self, name: str, device: Party[_Stage]) -> None:
        self.name, self.device = name, device
        self.chain: _Chain | None = None
        self.number = 0

    def is_of(self, chain: _Chain) -> bool:
        return self.chain is chain


class _Step(NamedTuple):
    """New tokens of a request on their way through the chain."""

    request: int
    tokens: int
    place: int  # tokens that were generated before the one that follows from it


class ServingSimulation(LinkedParties[_Stage]):
    """One service, from its first request to its last answer. It is the port of `Tokens`."""

    def __init__(
        self,
        problem: ServingProblem,
        chain: Chain,
        plan: Callable[[Sequence[str]], Chain],
        requests: Sequence[ServedRequest],
        options: SimulationOptions,
    ) -> None:
        """`plan` chooses a chain of some devices; FleetTooSmall where there is none. UserError: as
        `check_serving_faults`."""
        check_serving_faults(options.faults)
        super().__init__(problem.fleet, options)
        self._problem, self._chain, self._make_plan = problem, chain, plan
        self._requests = requests
        self._tokens: list[list[float]] = [[] for _ in requests]
        self._refused: dict[int, str] = {}
        self._open = set(range(len(requests)))
        self._forgotten: set[int] = set()
        self._notes: list[tuple[float, str]] = []
        self.connections = Connections(self, options, self)
        self.strikes = Strikes(self, self.connections, options, lambda: None)
        self.program = Tokens(
            self,
            chain.devices,
            problem.fleet.names,
            at_once=chain.at_once,
            vocabulary=1,
            timeout_s=options.recovery.timeout_s,
        )
        self.host = SimulatedHost(self.program, self.clock, self.strikes, regular=bool(options.faults))

    def run(self) -> SimulatedServing:
        """Until each request is answered or refused."""
        for number, request in enumerate(self._requests):
            prompt = Prompt(number=number, tokens=(0,) * request.prompt, sampling=Sampling(max_tokens=request.new))
            self.clock.at(request.arrives_s, "requests", partial(self.host.tell, partial(_submit, prompt)))
        for fault in self._options.faults:
            self.clock.at(fault.time_s, ("fault", fault.device), partial(self._strike, fault))
        later = {fault.device for fault in self._options.faults if fault.kind == "join"}
        for device in self._problem.fleet.names:
            if device in self._chain.devices:
                self.connections.join(device)
            elif device not in later:
                self.strikes.strike(Fault(kind="join", device=device, time_s=0.0))
        self.setting_up = True
        self.clock.run(MOST_S)
        if self._open:
            raise UserError(f"simulation: no answer within {MOST_S:g} s: expected devices and links that are quicker")
        answers = [SimulatedAnswer(tuple(t), self._refused.get(n, "")) for n, t in enumerate(self._tokens)]
        return SimulatedServing(
            answers=tuple(answers),
            notes=tuple(self._notes),
            losses=self.program.losses,
            chain=self._chain,
            without_effect=self.effects.without,
        )

    def _strike(self, fault: Fault) -> None:
        if not self.connections.over:
            self.strikes.struck(fault)
            self.strikes.strike(fault)

    # What the program hears

    def made(self, worker_id: str, device: Party[_Stage]) -> _Stage:
        return _Stage(worker_id, device)

    def arrived(self, worker: _Stage) -> None:
        self.host.tell(lambda program: program.joined(worker.name))

    def disconnected(self, device: str, reason: str) -> None:
        self.host.disconnected(device, reason)

    def _report(self, stage: _Stage, body: StageReport) -> None:
        self.connections.up(stage, lambda: self.host.tell(lambda program: program.heard(stage.name, body)))

    # What the program asks

    def plan(self, devices: Sequence[str]) -> Sequence[str]:
        self._chain = self._make_plan(devices)
        self.note(f"stages on {' > '.join(self._chain.devices)}")
        return self._chain.devices

    def load(self, chain: Sequence[str], epoch: int) -> None:
        seconds, crossing = self._problem.stage_costs(chain, self._chain.boundaries)
        loaded = _Chain(epoch, tuple(chain), tuple(seconds), tuple(crossing))
        for number, device in enumerate(chain):
            self.connections.down(device, partial(self._assigned, loaded, number))

    def start(self, prompt: Prompt, made: Sequence[int]) -> None:
        self._forgotten.discard(prompt.number)
        step = _Step(prompt.number, len(prompt.tokens) + len(made), len(made))
        chain, epoch = self.program.members, self.program.epoch
        self.connections.down(chain[0], partial(self._started, epoch, step))

    def forget(self, number: int) -> None:
        self._forgotten.add(number)

    def deliver(self, number: int, token: int, *, last: bool) -> None:
        self._tokens[number].append(self.clock.now_s)
        if last:
            self._close(number)

    def refuse(self, number: int, reason: str, *, of_request: bool = False) -> None:
        self._refused[number] = reason
        self._close(number)

    def _close(self, number: int) -> None:
        self._open.discard(number)
        if not self._open:
            self.later(0.0, "requests", self.program.stop)

    def call(self, device: str) -> None:
        self.strikes.call(device)

    def release(self, device: str) -> None:
        self.connections.release(device)
        self.devices.pop(device, None)

    def reject(self, device: str, *, permanent: bool) -> None:
        self.connections.hang_up(device)

    def note(self, text: str) -> None:
        self._notes.append((self.clock.now_s, text))

    def ended(self, reason: str) -> None:
        self.connections.over = True
        for number in sorted(self._open):
            self._refused[number] = reason
        self._open.clear()

    # Stages

    def _assigned(self, chain: _Chain, number: int, stage: _Stage) -> None:
        stage.chain, stage.number = chain, number
        seconds = self._options.recovery.stage_s if self.program.losses or self.clock.now_s else 0.0
        self.later(seconds, ("load", stage.name), partial(self.on, stage.device, partial(self._loaded, chain, stage)))

    def _loaded(self, chain: _Chain, stage: _Stage) -> None:
        if not stage.is_of(chain):
            return
        cut = [other for other in _beside(chain, stage) if self.is_cut(stage.name, other)]
        if cut or any(other not in self.devices for other in _beside(chain, stage)):
            self._unable(chain, f"cannot connect to device {(cut or ['of the chain'])[0]!r}", stage)
        else:
            self._report(stage, StageLoaded(epoch=chain.epoch))

    def _started(self, epoch: int, step: _Step, stage: _Stage) -> None:
        if stage.chain is not None and stage.chain.epoch == epoch:
            self._compute(stage.chain, step, stage)

    def _compute(self, chain: _Chain, step: _Step, stage: _Stage) -> None:
        """Compute a step when the device has computed the steps before it."""
        if not stage.is_of(chain) or step.request in self._forgotten:
            return
        lane, slow = stage.device.lane, self.slowed(stage.name)

        def begin() -> None:
            seconds = chain.stage_s[stage.number] * step.tokens * slow * self._factor()
            self.later(seconds, ("compute", stage.name), partial(self.on, stage.device, done))

        def done() -> None:
            if stage.is_of(chain) and step.request not in self._forgotten:
                self._computed(chain, step, stage)
            lane.release()

        lane.take("F", 0, begin)

    def _computed(self, chain: _Chain, step: _Step, stage: _Stage) -> None:
        following = stage.number + 1
        if following < len(chain.devices):
            size_bytes = chain.crossing_bytes[stage.number] * step.tokens
            self._send(chain, stage, chain.devices[following], size_bytes, step)
            return
        last = step.place + 1 >= self._requests[step.request].new
        self._report(
            stage, TokenGenerated(epoch=chain.epoch, prompt=step.request, place=step.place, token=0, last=last)
        )
        if not last:
            self._send(chain, stage, chain.devices[0], 0, _Step(step.request, 1, step.place + 1))

    def _send(self, chain: _Chain, stage: _Stage, target: str, size_bytes: int, step: _Step) -> None:
        if target == stage.name:
            self._compute(chain, step, stage)
            return
        if self.is_cut(stage.name, target):
            return  # who waits for it gives up
        sent_s = max(self.clock.now_s, self.cut_until_s(stage.name, target))
        times, source = self._network.send(sent_s, stage.name, target, size_bytes + FRAME_BYTES), stage.device

        def arrive() -> None:
            there = self.worker(target)
            if there is not None and source.died_s >= times.sent_s:
                self.on(there.device, partial(self._compute, chain, step, there))

        self.clock.at(times.arrived_s, ("link", stage.name, target), arrive)

    # What goes wrong

    def is_cut(self, one: str, other: str) -> bool:
        """For longer than anybody waits."""
        return self.cut_until_s(one, other) - self.clock.now_s > self._options.recovery.timeout_s

    def noticed(self, device: Party[_Stage], after_s: Callable[[str], float], how: str) -> None:
        for other in self.devices.values():
            for stage in other.workers.values() if other is not device else ():
                if stage.chain is not None and device.name in _beside(stage.chain, stage):
                    unable = partial(self._unable, stage.chain, f"device {device.name!r} {how}", stage)
                    self.later(after_s(other.name), ("notice", stage.name), partial(self.on, other, unable))

    def blame(self, name: str, other: str) -> None:
        stage = self.worker(name)
        if stage is None or stage.chain is None or self._cut_until_s(name, other) <= self.clock.now_s:
            return
        if other in _beside(stage.chain, stage):
            self.effects.met("link", name, other)
            reason = f"device {other!r}: stalled for {self._options.recovery.timeout_s:g} s"
            self.on(stage.device, partial(self._unable, stage.chain, reason, stage))

    def _unable(self, chain: _Chain, reason: str, stage: _Stage) -> None:
        if stage.is_of(chain):
            stage.chain = None
            self._report(stage, StageUnable(epoch=chain.epoch, reason=reason))


def _beside(chain: _Chain, stage: _Stage) -> list[str]:
    """Names of the devices that the stage has links to."""
    count = len(chain.devices)
    return [chain.devices[n % count] for n in (stage.number - 1, stage.number + 1) if n % count != stage.number]


def _submit(prompt: Prompt, program: Tokens) -> None:
    program.submit(prompt)
