"""Drawn integers in what stages that generate text tell their coordinator, through the decoder and its check into its
machine: requests get tokens that the model has, as many as they asked for, and then the right one goes on."""

from __future__ import annotations

import copy

from isthmus.errors import PeerError
from isthmus.protocol.generation import (
    DeliverToken,
    EndServing,
    GenerationInstruction,
    GenerationMachine,
    Prompt,
    PromptSubmitted,
    Sampling,
    ServerArrived,
    StageLoaded,
    StageReport,
    TokenGenerated,
)
from isthmus.protocol.machine import FromDevice, OutOfPhase
from isthmus.runtime.coordinator.generation_host import _guard
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.generation import ServingReport

from ..drawn_integers import Lies, landed

VOCABULARY, TOKENS, PROMPTS = 50, 4, 6


def conversation(lies: Lies | None) -> tuple[int, list[GenerationInstruction]]:
    """How many messages devices sent, and all that the coordinator did."""
    machine = GenerationMachine(("a", "b"), ("a", "b", "c"), at_once=2, vocabulary=VOCABULARY)
    done: list[GenerationInstruction] = []
    messages = 0

    def lie(message: AnyMessage, device: str) -> None:
        try:
            landed(message, (), lambda m: _guard(device, m))
        except PeerError as e:
            raise PeerError(f"device {device!r}: {e}") from None  # as the channel does
        assert isinstance(message, ServingReport)
        lied = copy.deepcopy(machine)
        try:
            said = lied.handle(FromDevice(device, message.body))
        except OutOfPhase as e:  # the host drops the device that sent it
            raise PeerError(f"device {device!r}: {e}") from None
        assert lied.epoch == machine.epoch and lied.phase in ("joining", "loading", "serving")
        assert not any(isinstance(one, EndServing) for one in said)
        for one in said:
            assert not isinstance(one, DeliverToken) or (one.token < VOCABULARY and one.number in machine._running)
        for prompt, made in lied._running.values():
            assert 0 <= prompt.number < PROMPTS and len(made) <= TOKENS and all(0 <= t < VOCABULARY for t in made)

    def say(device: str, body: StageReport) -> None:
        nonlocal messages
        messages += 1
        if lies is not None:
            lies.about(ServingReport(run="run", body=body), lambda m: lie(m, device), names=f"device {device!r}")
        done.extend(machine.handle(FromDevice(device, body)))

    for device in "ab":
        done += machine.handle(ServerArrived(device=device))
    for device in "ab":
        say(device, StageLoaded())
    for number in range(PROMPTS):
        prompt = Prompt(number=number, tokens=(1, 2), sampling=Sampling(max_tokens=TOKENS))
        done += machine.handle(PromptSubmitted(prompt=prompt))
    while machine._running:
        for number, (_, made) in list(machine._running.items()):
            place = len(made)
            token = (7 * number + place) % VOCABULARY
            say("b", TokenGenerated(prompt=number, place=place, token=token, last=place == TOKENS - 1))
    return messages, done


def test_a_drawn_integer_is_refused_or_one_that_the_service_may_have() -> None:
    messages, right = conversation(None)
    lies = Lies(38, messages)
    assert conversation(lies)[1] == right
    lies.told()
