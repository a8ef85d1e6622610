"""Generation by a chain of stages: which prompt runs when, and what happens when a device is lost.

    joining ──all here──► loading ──all loaded──► serving
       ▲                                             │
       └──── planning ◄──── a device is lost ────────┘

A prompt that runs is one micro-batch: several are in flight at a time. Stages keep its keys and values. When a device
is lost, another chain is planned, all stages are loaded anew under the next epoch, and each prompt starts again from
its tokens so far: they fill the caches, and the next token is the one that would have followed.

A prompt may itself end the devices that compute it. So prompts start again one after the other, each when the one
before has its next token: the prompt that was tried when a second device is lost is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.protocol.machine import Event, FromDevice, Machine, OutOfPhase, Transitions
from isthmus.protocol.run_messages import Body
from isthmus.wire_types import Count, Many, NotNegative, Positive, Seed, Text

RETRIES = 3
"""How often a chain is loaded again without a token in between, where a link broke and no device was lost."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen of logits, in the order of transformers: temperature, top-k, top-p."""

    max_tokens: Positive = 16
    """New tokens at most."""
    temperature: NotNegative = 0.0
    """0 takes the likeliest token; logits are divided by any other."""
    top_k: Count = 0
    """Draw from so many likeliest tokens; 0: from all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    seed: Seed = 0
    """Of the random numbers: those that torch draws after `torch.manual_seed(seed)`."""
    stop: Many[Count] = ()
    """Tokens that end the text."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A request."""

    number: int
    """Of no other request."""
    tokens: tuple[int, ...]
    sampling: Sampling


# Events of the host


class ServerArrived(Event, frozen=True, kw_only=True):
    device: str


class ServerLost(Event, frozen=True, kw_only=True):
    device: str
    reason: str


class ChainPlanned(Event, frozen=True, kw_only=True):
    """The devices of the stages, in order, for the epoch that asked."""

    devices: tuple[str, ...]


class NoChain(Event, frozen=True, kw_only=True):
    reason: str


class PromptSubmitted(Event, frozen=True, kw_only=True):
    prompt: Prompt


class PromptCancelled(Event, frozen=True, kw_only=True):
    number: int


class ServingStopped(Event, frozen=True, kw_only=True):
    pass


# Events that devices send


class StageLoaded(Body, frozen=True, kw_only=True):
    """The stage has its weights and its links."""


class StageUnable(Body, frozen=True, kw_only=True):
    """A link of the stage broke, or could not be made. What a device cannot compute ends its process."""

    reason: Text


class TokenGenerated(Body, frozen=True, kw_only=True):
    """Of the last stage."""

    prompt: Count
    place: Count
    """How many were generated before it."""
    token: Count
    last: bool


class PromptFailed(Body, frozen=True, kw_only=True):
    """No token can be chosen: of the last stage."""

    prompt: Count
    reason: Text
    of_request: bool = False
    """The request asks for what cannot be; else nothing can be chosen for any request."""


HostEvent = ServerArrived | ServerLost | ChainPlanned | NoChain | PromptSubmitted | PromptCancelled | ServingStopped
StageReport = StageLoaded | StageUnable | TokenGenerated | PromptFailed
GenerationEvent = HostEvent | FromDevice[StageReport]


# Instructions


class PlanChain(msgspec.Struct, frozen=True):
    """Answer with `ChainPlanned` or `NoChain` of this epoch."""

    devices: tuple[str, ...]
    epoch: int


class CallToServe(msgspec.Struct, frozen=True):
    device: str


class LoadStages(msgspec.Struct, frozen=True):
    devices: tuple[str, ...]
    epoch: int


class StartPrompt(msgspec.Struct, frozen=True):
    """Give the first stage all tokens so far; `made` of them were generated."""

    prompt: Prompt
    made: tuple[int, ...]


class ForgetPrompt(msgspec.Struct, frozen=True):
    """Every stage drops the prompt's keys and values."""

    number: int


class DeliverToken(msgspec.Struct, frozen=True):
    number: int
    token: int
    last: bool


class RefusePrompt(msgspec.Struct, frozen=True):
    """It gets no further tokens."""

    number: int
    reason: str
    of_request: bool = False
    """The fault is the request's own."""


class ReportLoss(msgspec.Struct, frozen=True):
    """For people."""

    text: str


class EndServing(msgspec.Struct, frozen=True):
    reason: str
    """Empty where it was asked for."""


GenerationInstruction = (
    PlanChain
    | CallToServe
    | LoadStages
    | StartPrompt
    | ForgetPrompt
    | DeliverToken
    | RefusePrompt
    | ReportLoss
    | EndServing
)
GenerationPhase = Literal["joining", "loading", "serving", "planning", "over"]


def _any_time(phase: str) -> dict[type[msgspec.Struct], str]:
    return {PromptSubmitted: phase, PromptCancelled: phase, ServingStopped: "over"}


GENERATION = Transitions(
    "joining",
    "over",
    {
        "joining": {
            **_any_time("joining"),
            ServerArrived: "joining loading",
            ServerLost: "joining planning over",
        },
        "loading": {
            **_any_time("loading"),
            ServerArrived: "loading",
            ServerLost: "loading planning over",
            StageLoaded: "loading serving",
            StageUnable: "loading over",
        },
        "serving": {
            **_any_time("serving"),
            ServerArrived: "serving",
            ServerLost: "serving planning over",
            StageUnable: "loading over",
            TokenGenerated: "serving",
            PromptFailed: "serving",
        },
        "planning": {
            **_any_time("planning"),
            ServerArrived: "planning",
            ServerLost: "planning over",
            ChainPlanned: "joining loading",
            NoChain: "over",
        },
    },
)


class GenerationMachine(Machine[GenerationPhase, GenerationEvent, GenerationInstruction]):
    """Of one service. `chain` are the devices of the first plan, `fleet` all that may be called."""

    transitions = GENERATION

    def __init__(self, chain: Sequence[str], fleet: Collection[str], *, at_once: int, vocabulary: int) -> None:
        """`at_once`: prompts in flight; others wait in the order in which they came. Tokens are below `vocabulary`."""
        super().__init__()
        self._vocabulary = vocabulary
        self.epoch = 0
        self.chain = tuple(chain)
        self.losses = 0
        """Devices of a chain that were lost."""
        self._usable = tuple(fleet)
        self._here: set[str] = set()
        self._called = set(chain)
        self._loaded: set[str] = set()
        self._at_once = at_once
        self._running: dict[int, tuple[Prompt, list[int]]] = {}
        self._waiting: deque[Prompt] = deque()
        self._restarts: deque[int] = deque()
        """Prompts in flight when stages are loaded anew, which have not started again."""
        self._tried: int | None = None
        """The one of them that has started and has no token since."""
        self._retries = 0

    def _is_stale(self, event: GenerationEvent) -> bool:
        if isinstance(event, FromDevice):
            return event.epoch != self.epoch or event.device not in self.chain
        return isinstance(event, ChainPlanned | NoChain) and event.epoch != self.epoch

    def _take(self, event: GenerationEvent) -> list[GenerationInstruction]:
        match event:
            case ServerArrived(device=device):
                self._here.add(device)
                return self._load() if self._phase == "joining" else []
            case ServerLost(device=device, reason=reason):
                return self._lost(device, reason)
            case ChainPlanned(devices=devices):
                return self._call(devices)
            case NoChain(reason=reason):
                return self._end(reason)
            case PromptSubmitted(prompt=prompt):
                self._waiting.append(prompt)
                return self._admit()
            case PromptCancelled(number=number):
                return self._cancel(number)
            case ServingStopped():
                return self._end("")
            case FromDevice(device=device, body=StageLoaded()):
                return self._stage_loaded(device)
            case FromDevice(device=device, body=StageUnable(reason=reason)):
                return self._again(device, reason)
            case FromDevice(device=device, body=TokenGenerated() as made):
                self._check_last(device)
                return self._generated(made)
            case FromDevice(device=device, body=PromptFailed(prompt=number, reason=reason, of_request=of_request)):
                self._check_last(device)
                return [RefusePrompt(number, reason, of_request), *self._cancel(number)]
            case _:
                raise AssertionError("all events are above")

    def _call(self, devices: tuple[str, ...]) -> list[GenerationInstruction]:
        self.chain, self._phase = devices, "joining"
        missing = [device for device in devices if device not in self._called]
        self._called.update(missing)
        return [*map(CallToServe, missing), *self._load()]

    def _load(self) -> list[GenerationInstruction]:
        if not self._here.issuperset(self.chain):
            return []
        self._phase = "loading"
        self._loaded.clear()
        return [LoadStages(self.chain, self.epoch)]

    def _stage_loaded(self, device: str) -> list[GenerationInstruction]:
        self._loaded.add(device)
        if not self._loaded.issuperset(self.chain):
            return []
        self._phase = "serving"
        self._restarts, self._tried = deque(self._running), None
        return self._admit()

    def _admit(self) -> list[GenerationInstruction]:
        if self._phase != "serving" or self._tried is not None:
            return []
        if self._restarts:
            self._tried = self._restarts.popleft()
            prompt, made = self._running[self._tried]
            return [StartPrompt(prompt, tuple(made))]
        found: list[GenerationInstruction] = []
        while self._waiting and len(self._running) < self._at_once:
            prompt = self._waiting.popleft()
            self._running[prompt.number] = (prompt, [])
            found.append(StartPrompt(prompt, ()))
        return found

    def _check_last(self, device: str) -> None:
        if device != self.chain[-1]:
            raise OutOfPhase("sent a request's token, which is for the last stage to send")

    def _generated(self, made: TokenGenerated) -> list[GenerationInstruction]:
        """OutOfPhase for what no honest last stage sends."""
        if not 0 <= made.token < self._vocabulary:
            raise OutOfPhase(f"sent token {made.token}, the model has 0 to {self._vocabulary - 1}")
        if (found := self._running.get(made.prompt)) is None or made.place != len(found[1]):
            return []  # of one that was cancelled
        prompt, before = found
        if made.place >= prompt.sampling.max_tokens:
            raise OutOfPhase(f"sent token {made.place + 1} of a request for {prompt.sampling.max_tokens}")
        before.append(made.token)
        self._retries = 0
        if made.prompt == self._tried:
            self._tried = None
        deliver = DeliverToken(made.prompt, made.token, made.last)
        return [deliver, *(self._cancel(made.prompt) if made.last else self._admit())]

    def _cancel(self, number: int) -> list[GenerationInstruction]:
        self._waiting = deque(prompt for prompt in self._waiting if prompt.number != number)
        if self._running.pop(number, None) is None:
            return []
        self._restarts = deque(other for other in self._restarts if other != number)
        if self._tried == number:
            self._tried = None
        return [ForgetPrompt(number), *self._admit()]

    def _lost(self, device: str, reason: str) -> list[GenerationInstruction]:
        self._here.discard(device)
        self._usable = tuple(name for name in self._usable if name != device)
        if device not in self.chain:
            return []
        self.losses += 1
        self.epoch += 1
        if not self._usable:
            return self._end(f"no device is left: {device}: {reason}")
        self._phase = "planning"
        refused = self._refuse_tried(device, reason)
        text = f"lost {device}: {reason}; {len(self._running)} requests go on with other devices"
        return [ReportLoss(text), *refused, PlanChain(self._usable, self.epoch)]

    def _refuse_tried(self, device: str, reason: str) -> list[GenerationInstruction]:
        if (number := self._tried) is None:
            return []
        self._tried = None
        del self._running[number]
        text = f"a second device, {device}, was lost while the request's next token was computed: {reason}"
        return [RefusePrompt(number, text)]

    def _again(self, device: str, reason: str) -> list[GenerationInstruction]:
        self._retries += 1
        if self._retries > RETRIES:
            return self._end(f"{device}: {reason}, after {RETRIES} further tries")
        self.epoch += 1
        return [ReportLoss(f"{device}: {reason}; loading the stages again"), *self._load()]

    def _end(self, reason: str) -> list[GenerationInstruction]:
        self._phase = "over"
        return [EndServing(reason)]
