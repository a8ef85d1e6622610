"""Which prompt runs when, and what happens when a device of a chain is lost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from isthmus.programs.tokens import RETRIES, Tokens
from isthmus.protocol.generation import Prompt, PromptFailed, Sampling, StageLoaded, StageUnable, TokenGenerated
from isthmus.session.session import CLOSED, GRACE_S, Observation

from .ports import Asked, ServingRecorder


class Service:
    """A program, and what it asks: each method returns what it asked because of it."""

    def __init__(self, chain: Sequence[str], fleet: Sequence[str], at_once: int = 2) -> None:
        self.port = ServingRecorder()
        self.fleet = frozenset(fleet)
        """All that are not connected could work."""
        self.program = Tokens(self.port.port, chain, fleet, at_once=at_once, vocabulary=1000)

    def joined(self, device: str) -> list[Asked]:
        self.program.joined(device)
        return self.port.took()

    def gone(self, device: str, *chains: Sequence[str] | str, reason: str = "killed") -> list[Asked]:
        """But for the hang-up."""
        self.port.chains.extend(chains)
        over = self.program.over
        self.program.disconnected(device, reason)
        asked = self.looked(0.0) + self.looked(GRACE_S)
        assert over or asked[0] == ("reject", device, False)
        return asked[1:]

    def looked(self, later_s: float) -> list[Asked]:
        """So much later."""
        self.program.clock(self.program.now_s + later_s)
        self.program.looked(Observation(offers=self.fleet))
        return self.port.took()

    def submit(self, number: int) -> list[Asked]:
        self.program.submit(Prompt(number=number, tokens=(number, 1), sampling=Sampling(max_tokens=20)))
        return self.port.took()

    def cancel(self, number: int) -> list[Asked]:
        self.program.cancel(number)
        return self.port.took()

    def heard(
        self, device: str, body: StageLoaded | StageUnable | TokenGenerated | PromptFailed, epoch: int | None = None
    ) -> list[Asked]:
        """Under the present epoch, where none is given."""
        epoch = self.program.epoch if epoch is None else epoch
        self.program.heard(device, msgspec.structs.replace(body, epoch=epoch))
        return self.port.took()

    def broken(self, device: str) -> list[Asked]:
        """It says that a link broke, and nothing else happens."""
        return self.heard(device, StageUnable(reason="link lost")) + self.looked(0.0) + self.looked(GRACE_S)

    def loaded(self, *devices: str) -> list[Asked]:
        return [asked for device in devices for asked in self.heard(device, StageLoaded())]

    def token(self, place: int, of: int, *, last: bool = False, epoch: int | None = None) -> list[Asked]:
        body = TokenGenerated(prompt=of, place=place, token=100 * of + place, last=last)
        return self.heard(self.program.members[-1], body, epoch)

    def on_another(self, lost: str, chosen: str) -> list[Asked]:
        """The chain goes on with one other device: what is asked when it has its stage."""
        self.gone(lost, (chosen,))
        self.joined(chosen)
        return self.loaded(chosen)


def serving(at_once: int = 2) -> Service:
    """Stages on a and b; c is spare."""
    service = Service(("a", "b"), ("a", "b", "c"), at_once)
    assert service.joined("a") == []
    assert service.joined("b") == [("load", "a", "b", 0)]
    service.loaded("a", "b")
    assert service.program.phase == "serving"
    return service


def test_so_many_prompts_run_at_once_and_others_wait_in_their_order() -> None:
    service = serving(at_once=2)
    assert [service.submit(n) for n in range(4)] == [[("start", 0)], [("start", 1)], [], []]
    assert service.token(0, of=1) == [("deliver", 1, 100, False)]
    assert service.token(1, of=1, last=True) == [("deliver", 1, 101, True), ("forget", 1), ("start", 2)]
    assert service.cancel(3) == []
    assert service.cancel(0) == [("forget", 0)]
    assert service.token(0, of=0) == []


def test_prompts_go_on_from_their_tokens_when_a_device_is_lost() -> None:
    service = serving()
    for n in range(3):
        service.submit(n)
    service.token(0, of=0)
    service.token(1, of=0)
    lost = service.gone("b", ("c", "a"))
    assert lost[0][0] == "note" and lost[1:] == [("plan", "a", "c"), ("call", "c")]
    assert service.token(2, of=0, epoch=0) == [] and service.program.stale == 1  # it was on its way
    assert service.submit(3) == []
    assert service.joined("c") == [("load", "c", "a", 1)]
    assert service.loaded("a", "c") == [("start", 0, 0, 1)]
    assert service.token(2, of=0, last=True) == [("deliver", 0, 2, True), ("forget", 0), ("start", 1)]
    assert service.token(0, of=1) == [("deliver", 1, 100, False), ("start", 2)]
    assert service.program.losses == 1


def restarted(number: int) -> Service:
    """A device was lost while so many prompts ran; the first of them has started again, on b."""
    service = Service(("a",), ("a", "b", "c", "d"), at_once=number)
    service.joined("a")
    service.loaded("a")
    for n in range(number):
        service.submit(n)
    assert service.on_another("a", "b") == [("start", 0)]
    return service


def test_a_prompt_that_ends_a_second_device_is_refused_and_no_other() -> None:
    service = restarted(3)
    assert service.token(0, of=0)[1:] == [("start", 1)]
    text = "a second device, b, was lost while the request's next token was computed: killed"
    note, *others = service.gone("b", ("c",))
    assert note == ("note", "lost b: killed; 2 requests go on with other devices")
    assert others == [("refuse", 1, text, False), ("plan", "c", "d"), ("call", "c")]
    service.joined("c")
    assert service.loaded("c") == [("start", 0, 0)]
    assert service.token(1, of=0)[1:] == [("start", 2)]


def test_a_prompt_that_is_cancelled_while_it_is_tried_blames_no_other() -> None:
    service = restarted(2)
    assert service.cancel(0) == [("forget", 0), ("start", 1)]
    assert service.token(0, of=1) == [("deliver", 1, 100, False)]
    assert service.on_another("b", "c") == [("start", 1, 100)]


def test_a_device_lost_before_prompts_start_again_blames_none() -> None:
    service = restarted(2)
    service.token(0, of=0)
    service.token(0, of=1)
    service.gone("b", ("c",))
    assert service.gone("c", ("d",))[1:] == [("plan", "d"), ("call", "d")]


def test_a_device_without_a_stage_is_lost_without_a_new_plan() -> None:
    service = serving()
    assert service.gone("c") == []
    assert service.gone("b", ("a",))[1:] == [("plan", "a"), ("load", "a", 1)]


def test_without_devices_or_a_chain_it_ends() -> None:
    service = Service(("a",), ("a", "b"))
    service.gone("a", ("b",))
    assert service.gone("b") == [("ended", "no device is left: b: killed")]
    service = serving()
    service.gone("c")
    assert service.gone("a", "no memory")[1:] == [("plan", "b"), ("ended", "no memory")]
    assert service.program.over
    assert service.submit(0) == service.joined("b") == service.gone("b") == service.loaded("b") == []


def test_a_broken_link_loads_the_same_stages_again_a_few_times() -> None:
    service = serving()
    service.submit(0)
    for epoch in range(RETRIES):
        assert service.broken("a")[1:] == [("load", "a", "b", epoch + 1)]
    service.port.chains.append(("b", "c"))
    given_up = [("reject", "a", False), ("note", "lost a: link lost; 1 request goes on with other devices")]
    assert service.broken("a") == [*given_up, ("plan", "b", "c"), ("call", "c")]
    service.joined("a")
    assert service.program.usable == ("a", "b", "c")


def test_a_device_whose_connection_is_made_again_may_be_used_again() -> None:
    service = serving()
    service.gone("a", ("b",))
    assert service.program.usable == ("b", "c")
    assert service.joined("a") == [] and service.loaded("b") == []
    assert service.gone("b", ("a",))[1:] == [("plan", "a", "c"), ("load", "a", 2)]


def test_a_device_that_is_asked_to_leave_is_released_once_the_others_have_a_chain() -> None:
    service = serving()
    service.submit(0)
    service.port.chains.append(("b",))
    service.program.looked(Observation(leaving=frozenset({"a", "c"}), offers=service.fleet))
    left = [("release", "a"), ("note", "a has left: it was asked to")]
    assert service.port.took() == [("plan", "b"), *left, ("load", "b", 1)]
    assert service.loaded("b") == [("start", 0)]
    assert (service.program.losses, service.program.usable) == (0, ("b",))


def test_a_loss_after_one_left_refuses_no_request() -> None:
    service = serving()
    service.submit(0)
    service.port.chains.append(("b", "c"))
    service.program.looked(Observation(leaving=frozenset({"a"}), offers=service.fleet))
    service.joined("c")
    assert service.loaded("b", "c")[-1] == ("start", 0)
    lost = service.gone("c", ("b",))
    assert [asked[0] for asked in lost] == ["note", "plan", "load"]


def test_a_device_without_which_there_is_no_chain_stays() -> None:
    service = serving()
    service.port.chains.append("too little memory")
    service.program.looked(Observation(leaving=frozenset({"a"}), offers=service.fleet))
    stays = "a was asked to leave and stays: too little memory"
    assert service.port.took() == [("plan", "b", "c"), ("note", stays)]
    assert service.submit(0) == [("start", 0)]


def test_a_device_that_is_lost_explains_the_links_that_broke() -> None:
    """Its neighbour noticed first."""
    service = serving()
    service.port.chains.append(("a",))
    assert service.heard("a", StageUnable(reason="link lost")) == service.looked(0.0) == []
    service.program.disconnected("b")
    assert service.looked(GRACE_S)[:2] == [
        ("reject", "b", False),
        ("note", f"lost b: {CLOSED}; 0 requests go on with other devices"),
    ]


def test_a_token_between_two_broken_links_starts_the_count_again() -> None:
    service = serving()
    service.submit(0)
    for n in range(2 * RETRIES):
        service.broken("a")
        service.loaded("a", "b")
        service.token(n, of=0)
    assert service.program.phase == "serving"


def test_a_prompt_whose_logits_are_not_finite_is_refused_alone() -> None:
    service = serving(at_once=1)
    for n in range(2):
        service.submit(n)
    failed = PromptFailed(prompt=0, reason="not finite", of_request=True)
    assert service.heard("b", failed) == [("refuse", 0, "not finite", True), ("forget", 0), ("start", 1)]


def test_tokens_before_stages_are_loaded_are_out_of_phase() -> None:
    service = Service(("a",), ("a",))
    service.joined("a")
    assert service.token(0, of=0) == [] and service.program.urgent
    assert service.looked(0.0) == [
        ("reject", "a", True),
        ("ended", "no device is left: a: TokenGenerated came in phase 'loading'"),
    ]


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
    service = serving()
    service.submit(0)
    for place in range(sent.get("place", 0)):
        service.token(place, of=0)
    body = msgspec.structs.replace(TokenGenerated(prompt=0, place=0, token=0, last=False), **sent)
    service.port.chains.append(("c",))
    assert service.heard(device, body) == [] and service.program.urgent
    lost = service.looked(0.0)
    assert lost[0] == ("reject", device, True)
    assert lost[1] == ("note", f"lost {device}: {said}; 1 request goes on with other devices")
