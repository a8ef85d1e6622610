"""Drawn integers in what stages that generate text tell their coordinator, through the decoder and its check into its
program: requests get tokens that the model has, as many as they asked for, and then the right one goes on."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest

from isthmus.errors import PeerError
from isthmus.programs.tokens import Tokens
from isthmus.protocol.generation import Prompt, Sampling, StageLoaded, StageReport, TokenGenerated
from isthmus.runtime.coordinator.generation_host import GenerationHost
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import ServingReport

from ..drawn_integers import Lies, landed
from ..programs.ports import Asked, ServingRecorder

pytestmark = pytest.mark.thorough

VOCABULARY, TOKENS, PROMPTS = 50, 4, 6


def conversation(lies: Lies | None) -> tuple[int, list[Asked]]:
    """Return how many messages devices sent, and all that the program asked."""
    port = ServingRecorder()
    program = Tokens(port.port, ("a", "b"), ("a", "b", "c"), at_once=2, vocabulary=VOCABULARY)
    messages = 0

    def lie(message: AnyMessage, device: str) -> None:
        try:
            landed(message, (), lambda m: GenerationHost.guard(cast(Any, None), device, m))
        except PeerError as e:
            raise PeerError(f"device {device!r}: {e}") from None  # as the channel does
        assert isinstance(message, ServingReport)
        lied = copy.deepcopy(program)
        assert isinstance(lied.port, ServingRecorder)
        lied.port.took()
        lied.heard(device, message.body)
        if lied.urgent:  # it is lost when the host looks
            raise lied._failures._reported[-1].failure
        assert lied.epoch == program.epoch and lied.phase in ("joining", "loading", "serving")
        for what, *details in lied.port.took():
            assert what != "ended"
            if what == "deliver":
                number, token, _ = details
                assert isinstance(token, int) and token < VOCABULARY and number in program._running
        for prompt, made in lied._running.values():
            assert 0 <= prompt.number < PROMPTS and len(made) <= TOKENS and all(0 <= t < VOCABULARY for t in made)

    def say(device: str, body: StageReport) -> None:
        nonlocal messages
        messages += 1
        if lies is not None:
            lies.about(ServingReport(run="run", body=body), lambda m: lie(m, device), names=f"device {device!r}")
        program.heard(device, body)

    for device in "ab":
        program.joined(device)
    for device in "ab":
        say(device, StageLoaded())
    for number in range(PROMPTS):
        program.submit(Prompt(number=number, tokens=(1, 2), sampling=Sampling(max_tokens=TOKENS)))
    while program._running:
        for number, (_, made) in list(program._running.items()):
            place = len(made)
            token = (7 * number + place) % VOCABULARY
            say("b", TokenGenerated(prompt=number, place=place, token=token, last=place == TOKENS - 1))
    return messages, port.took()


def test_a_drawn_integer_is_refused_or_one_that_the_service_may_have() -> None:
    messages, right = conversation(None)
    lies = Lies(38, messages)
    assert conversation(lies)[1] == right
    lies.told()
