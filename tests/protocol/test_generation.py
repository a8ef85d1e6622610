"""Which prompt runs when, and what happens when a device of a chain is lost."""

from __future__ import annotations

import msgspec
import pytest

from isthmus.protocol.generation import (
    RETRIES,
    CallToServe,
    ChainPlanned,
    DeliverToken,
    EndServing,
    ForgetPrompt,
    GenerationInstruction,
    GenerationMachine,
    LoadStages,
    NoChain,
    PlanChain,
    Prompt,
    PromptCancelled,
    PromptFailed,
    PromptSubmitted,
    RefusePrompt,
    ReportLoss,
    Sampling,
    ServerArrived,
    ServerLost,
    ServingStopped,
    StageLoaded,
    StageUnable,
    StartPrompt,
    TokenGenerated,
)
from isthmus.protocol.machine import FromDevice, OutOfPhase


def prompt(number: int) -> Prompt:
    return Prompt(number=number, tokens=(number, 1), sampling=Sampling(max_tokens=20))


def token(place: int, of: int, last: bool = False, epoch: int = 0, device: str = "b") -> FromDevice[TokenGenerated]:
    body = TokenGenerated(epoch=epoch, prompt=of, place=place, token=100 * of + place, last=last)
    return FromDevice(device, body)


def serving(at_once: int = 2) -> GenerationMachine:
    """Stages on a and b; c is spare."""
    machine = GenerationMachine(("a", "b"), ("a", "b", "c"), at_once=at_once, vocabulary=1000)
    assert machine.handle(ServerArrived(device="a")) == []
    assert machine.handle(ServerArrived(device="b")) == [LoadStages(("a", "b"), 0)]
    loaded(machine, "a", "b")
    assert machine.phase == "serving"
    return machine


def loaded(machine: GenerationMachine, *devices: str) -> list[GenerationInstruction]:
    found: list[GenerationInstruction] = []
    for device in devices:
        found += machine.handle(FromDevice(device, StageLoaded(epoch=machine.epoch)))
    return found


def test_so_many_prompts_run_at_once_and_others_wait_in_their_order() -> None:
    machine = serving(at_once=2)
    started = [machine.handle(PromptSubmitted(prompt=prompt(n))) for n in range(4)]
    assert started == [[StartPrompt(prompt(0), ())], [StartPrompt(prompt(1), ())], [], []]
    assert machine.handle(token(0, of=1)) == [DeliverToken(1, 100, last=False)]
    assert machine.handle(token(1, of=1, last=True)) == [
        DeliverToken(1, 101, last=True),
        ForgetPrompt(1),
        StartPrompt(prompt(2), ()),
    ]
    assert machine.handle(PromptCancelled(number=3)) == []
    assert machine.handle(PromptCancelled(number=0)) == [ForgetPrompt(0)]
    assert machine.handle(token(0, of=0)) == []


def test_prompts_go_on_from_their_tokens_when_a_device_is_lost() -> None:
    machine = serving()
    for n in range(3):
        machine.handle(PromptSubmitted(prompt=prompt(n)))
    machine.handle(token(0, of=0))
    machine.handle(token(1, of=0))
    lost = machine.handle(ServerLost(device="b", reason="its process ended"))
    assert isinstance(lost[0], ReportLoss) and lost[1:] == [PlanChain(("a", "c"), 1)]
    assert machine.handle(token(2, of=0)) == [] and machine.stale == 1  # it was on its way
    assert machine.handle(PromptSubmitted(prompt=prompt(3))) == []
    assert machine.handle(ChainPlanned(devices=("c", "a"), epoch=1)) == [CallToServe("c")]
    assert machine.handle(ServerArrived(device="c")) == [LoadStages(("c", "a"), 1)]
    assert loaded(machine, "a", "c") == [StartPrompt(prompt(0), (0, 1))]
    assert machine.handle(token(2, of=0, last=True, epoch=1, device="a")) == [
        DeliverToken(0, 2, last=True),
        ForgetPrompt(0),
        StartPrompt(prompt(1), ()),
    ]
    assert machine.handle(token(0, of=1, epoch=1, device="a")) == [
        DeliverToken(1, 100, last=False),
        StartPrompt(prompt(2), ()),
    ]
    assert machine.losses == 1


def restarted(number: int) -> GenerationMachine:
    """A device was lost while so many prompts ran; the first of them has started again, on c."""
    machine = GenerationMachine(("a",), ("a", "b", "c", "d"), at_once=number, vocabulary=1000)
    machine.handle(ServerArrived(device="a"))
    loaded(machine, "a")
    for n in range(number):
        machine.handle(PromptSubmitted(prompt=prompt(n)))
    assert on_another(machine, "a", "b") == [StartPrompt(prompt(0), ())]
    return machine


def on_another(machine: GenerationMachine, lost: str, chosen: str) -> list[GenerationInstruction]:
    machine.handle(ServerLost(device=lost, reason="killed"))
    machine.handle(ChainPlanned(devices=(chosen,), epoch=machine.epoch))
    machine.handle(ServerArrived(device=chosen))
    return loaded(machine, chosen)


def test_a_prompt_that_ends_a_second_device_is_refused_and_no_other() -> None:
    machine = restarted(3)
    assert machine.handle(token(0, of=0, epoch=1, device="b"))[1:] == [StartPrompt(prompt(1), ())]
    lost = machine.handle(ServerLost(device="b", reason="killed"))
    refused = RefusePrompt(1, "a second device, b, was lost while the request's next token was computed: killed")
    assert lost[1:] == [refused, PlanChain(("c", "d"), 2)]
    machine.handle(ChainPlanned(devices=("c",), epoch=2))
    machine.handle(ServerArrived(device="c"))
    assert loaded(machine, "c") == [StartPrompt(prompt(0), (0,))]
    assert machine.handle(token(1, of=0, epoch=2, device="c"))[1:] == [StartPrompt(prompt(2), ())]


def test_a_prompt_that_is_cancelled_while_it_is_tried_blames_no_other() -> None:
    machine = restarted(2)
    assert machine.handle(PromptCancelled(number=0)) == [ForgetPrompt(0), StartPrompt(prompt(1), ())]
    assert machine.handle(token(0, of=1, epoch=1, device="b")) == [DeliverToken(1, 100, last=False)]
    assert on_another(machine, "b", "c") == [StartPrompt(prompt(1), (100,))]


def test_a_device_lost_before_prompts_start_again_blames_none() -> None:
    machine = restarted(2)
    machine.handle(token(0, of=0, epoch=1, device="b"))
    machine.handle(token(0, of=1, epoch=1, device="b"))
    machine.handle(ServerLost(device="b", reason="killed"))
    machine.handle(ChainPlanned(devices=("c",), epoch=2))
    lost = machine.handle(ServerLost(device="c", reason="did not come"))
    assert lost[1:] == [PlanChain(("d",), 3)]


def test_a_device_without_a_stage_is_lost_without_a_new_plan() -> None:
    machine = serving()
    assert machine.handle(ServerLost(device="c", reason="gone")) == []
    assert machine.handle(ServerLost(device="b", reason="gone"))[1:] == [PlanChain(("a",), 1)]


@pytest.mark.parametrize("last", [ServerLost(device="a", reason="gone"), NoChain(reason="no memory", epoch=2)])
def test_without_a_chain_it_ends(last: ServerLost | NoChain) -> None:
    machine = GenerationMachine(("a",), ("a", "b"), at_once=1, vocabulary=1000)
    machine.handle(ServerLost(device="a", reason="gone"))
    machine.handle(ChainPlanned(devices=("b",), epoch=1))
    if isinstance(last, NoChain):
        machine = serving()
        machine.handle(ServerLost(device="a", reason="gone"))
        machine.handle(ServerLost(device="c", reason="gone"))
        assert machine.handle(NoChain(reason="no memory", epoch=1)) == [EndServing("no memory")]
    else:
        (ended,) = machine.handle(ServerLost(device="b", reason="gone"))
        assert isinstance(ended, EndServing) and "no device is left" in ended.reason
    assert machine.phase == "over"


def test_a_broken_link_loads_the_same_stages_again_a_few_times() -> None:
    machine = serving()
    machine.handle(PromptSubmitted(prompt=prompt(0)))
    for epoch in range(RETRIES):
        broken = FromDevice("a", StageUnable(epoch=epoch, reason="link lost"))
        assert machine.handle(broken)[1:] == [LoadStages(("a", "b"), epoch + 1)]
    broken = FromDevice("a", StageUnable(epoch=RETRIES, reason="link lost"))
    (ended,) = machine.handle(broken)
    assert isinstance(ended, EndServing) and "link lost" in ended.reason


def test_a_token_between_two_broken_links_starts_the_count_again() -> None:
    machine = serving()
    machine.handle(PromptSubmitted(prompt=prompt(0)))
    for n in range(2 * RETRIES):
        machine.handle(FromDevice("a", StageUnable(epoch=n, reason="link lost")))
        loaded(machine, "a", "b")
        machine.handle(token(n, of=0, epoch=n + 1))
    assert machine.phase == "serving"


def test_a_prompt_whose_logits_are_not_finite_is_refused_alone() -> None:
    machine = serving(at_once=1)
    for n in range(2):
        machine.handle(PromptSubmitted(prompt=prompt(n)))
    failed = FromDevice("b", PromptFailed(epoch=0, prompt=0, reason="not finite", of_request=True))
    assert machine.handle(failed) == [
        RefusePrompt(0, "not finite", of_request=True),
        ForgetPrompt(0),
        StartPrompt(prompt(1), ()),
    ]


def test_tokens_before_stages_are_loaded_are_out_of_phase() -> None:
    machine = GenerationMachine(("a",), ("a",), at_once=1, vocabulary=1000)
    machine.handle(ServerArrived(device="a"))
    with pytest.raises(OutOfPhase):
        machine.handle(token(0, of=0, device="a"))
    assert machine.handle(ServingStopped()) == [EndServing("")]


@pytest.mark.parametrize(
    ("sent", "device", "said"),
    [
        ({"token": 1000}, "b", "sent token 1000, the model has 0 to 999"),
        ({"token": 1 << 60}, "b", "sent token 1152921504606846976, the model has 0 to 999"),
        ({"place": 20}, "b", "sent token 21 of a request for 20"),
        ({}, "a", "sent a request's token, which is for the last stage to send"),
    ],
)
def test_a_device_that_sends_what_no_last_stage_sends_is_named(sent: dict[str, int], device: str, said: str) -> None:
    machine = serving()
    machine.handle(PromptSubmitted(prompt=prompt(0)))
    for place in range(sent.get("place", 0)):
        machine.handle(token(place, of=0))
    body = msgspec.structs.replace(token(0, of=0).body, **sent)
    with pytest.raises(OutOfPhase, match=said):
        machine.handle(FromDevice(device, body))
    lost = machine.handle(ServerLost(device=device, reason=said))  # as the host goes on
    assert lost[0] == ReportLoss(f"lost {device}: {said}; 1 requests go on with other devices")
