"""A site's owner: rules of the site's file, a word for each run, and a log of what left."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from isthmus import api
from isthmus.api.make_plan import plan_for
from isthmus.data import DataSpec
from isthmus.errors import PeerError, UserError
from isthmus.federated.admission import Privacy
from isthmus.federated.algorithms import AlgorithmSpec
from isthmus.federated.local import LocalConfig
from isthmus.federated.robust import Aggregation
from isthmus.federated.task_spec import (
    Approval,
    SiteConfig,
    SiteLog,
    SiteLogLine,
    TaskSpec,
    described,
    digest_of,
    refusal,
)
from isthmus.models import ModelSpec
from isthmus.protocol.federated_messages import PhaseId, PhaseOpened, PhaseSetup
from isthmus.runtime.federated.site_runner import SiteExecutor, SiteLink, SiteRunner
from isthmus.runtime.messages.federated import ToExecutor
from isthmus.runtime.transport.message_sender import MessageSender
from isthmus.runtime.transport.reconnection import OpenConnection
from tests.runtime.commands import isthmus

ASKED = TaskSpec(
    job="clinics",
    run="0" * 32,
    algorithm=AlgorithmSpec(name="fedavg"),
    model=ModelSpec(name="mlp"),
    local=LocalConfig(),
    seed=0,
    client=0,
    rounds=20,
    sites=("north", "south"),
    aggregation=Aggregation(secure=True, most_samples=64),
    privacy=Privacy(clip=1.0, noise_multiplier=1.2, noise="sites"),
    epsilon=3.0,
    epsilon_so_far=1.25,
)


@pytest.mark.parametrize(
    ("allowed", "asked", "words"),
    [
        (Approval(secure=True), {"aggregation": Aggregation()}, "approval.secure: this site sends masked updates only"),
        (Approval(max_epsilon=3.0), {"epsilon": 3.5}, "approval.max_epsilon: this site allows 3, .* 3.5"),
        (Approval(max_epsilon=3.0), {"epsilon": None}, "approval.max_epsilon: .* none is promised"),
        (Approval(max_rounds=20), {"rounds": 21}, "approval.max_rounds: this site allows 20, .* 21"),
        (Approval(min_sites=2), {"sites": ("north",)}, "approval.min_sites: this site wants 2, the run has 1"),
        (Approval(sites=("north", "south")), {"sites": ("north", "east")}, "approval.sites: east takes part"),
        (
            Approval(sites=("north", f"south:{'1' * 32}")),
            {"sites": ("north", "east")},
            "approval.sites: east takes part",
        ),
    ],
)
def test_a_rule_refuses_what_it_is_for_and_nothing_else(
    allowed: Approval, asked: dict[str, object], words: str
) -> None:
    assert refusal(allowed, ASKED) is None
    reason = refusal(allowed, msgspec.structs.replace(ASKED, **asked))
    with pytest.raises(UserError, match=words):
        raise UserError(reason or "")


def test_an_owner_reads_all_that_an_answer_holds_for() -> None:
    text = described(ASKED)
    for words in ("fedavg", "mlp", "20 rounds", "north, south", "the sum of all updates", "epsilon: 3 ", "so far 1.25"):
        assert words in text, text
    plain = described(msgspec.structs.replace(ASKED, aggregation=Aggregation(), privacy=None))
    assert "this site's update" in plain
    assert "no promise" in plain and "accuracy" not in plain
    reports = msgspec.structs.replace(ASKED, aggregation=Aggregation(), privacy=None)
    assert "how many there are, loss, accuracy\n" in described(reports, ("loss", "accuracy"))


def test_an_answer_holds_for_the_same_request_alone() -> None:
    assert digest_of(msgspec.structs.replace(ASKED, epsilon_so_far=2.0)) == digest_of(ASKED)
    for change in ({"rounds": 21}, {"sites": ("north", "east")}, {"aggregation": Aggregation()}):
        assert digest_of(msgspec.structs.replace(ASKED, **change)) != digest_of(ASKED)


def test_the_owners_word_is_written_down_and_counts_last(tmp_path: Path) -> None:
    site_log = SiteLog(tmp_path)
    with pytest.raises(UserError, match="nothing waits for an answer"):
        api.site.answer(tmp_path, yes=True)
    site_log.note("asked", "clinics", "run", described(ASKED), request="first")
    said = isthmus("site", "yes", "--state", tmp_path)
    assert said.code == 0 and "answered yes: the run of clinics" in said.err
    assert site_log.answer("first") is True
    site_log.note("asked", "clinics", "run", described(ASKED), request="second")
    assert site_log.answer("second") is None
    assert isthmus("site", "no", "--state", tmp_path).code == 0
    assert (site_log.answer("first"), site_log.answer("second")) == (True, False)
    with pytest.raises(UserError, match="nothing waits for an answer"):
        api.site.answer(tmp_path, yes=False)
    api.site.answer(tmp_path, yes=True)  # the owner's mind may change
    assert site_log.answer("second") is True
    site_log.add(SiteLogLine(time_s=0.0, event="sent", job="clinics", run="run", text="the update", size_bytes=800))
    shown = isthmus("site", "log", "--state", tmp_path)
    assert shown.code == 0
    assert "by the owner" in shown.out
    assert "the update" in shown.out


def test_nothing_leaves_after_a_yes_was_taken_back(tmp_path: Path) -> None:
    config = SiteConfig(
        job=ASKED.job,
        algorithm=ASKED.algorithm,
        model=ASKED.model,
        data=DataSpec(kind="digits"),
        approval=Approval(ask=True),
    )
    runner: Any = SiteRunner(config, "north", tmp_path, log=lambda _: None, fail=lambda _: None, plan=plan_for)
    site_log, request = SiteLog(tmp_path), digest_of(ASKED)
    site_log.note("asked", ASKED.job, ASKED.run, described(ASKED), request=request)
    api.site.answer(tmp_path, yes=True)
    runner._note_sent(ASKED, PhaseId(0), "the update", 800, None)
    api.site.answer(tmp_path, yes=False)
    with pytest.raises(UserError, match="owner said no to the run of clinics"):
        runner._note_sent(ASKED, PhaseId(1), "the update", 800, None)
    assert [line.event for line in site_log.lines()] == ["asked", "allowed", "sent", "refused"]


class Coordinator:
    """A channel on which a round is opened."""

    def __init__(self, round_: int) -> None:
        setup = PhaseSetup(phase=PhaseId(round_), clients=1, samples=1)
        self._opened = ToExecutor(run=ASKED.run, body=PhaseOpened(opening=setup, tasks=()))

    def receive(self, *_: object, **__: object) -> tuple[ToExecutor, list[Tensor]]:
        return self._opened, []


@pytest.mark.parametrize("round_", [-8, 20])
def test_a_site_hangs_up_on_a_coordinator_that_opens_a_round_that_the_run_has_not(round_: int) -> None:
    beyond: Any = Coordinator(round_)
    link = SiteLink(
        name="north",
        connection=OpenConnection(beyond, MessageSender(beyond, on_error=lambda _: None), ASKED.run, 1.0),
        log=lambda _: None,
        check=partial(ASKED.check_order, passes=1, samples=8),
    )
    site: Any = None
    with pytest.raises(PeerError, match=f"coordinator: asked for round {round_ + 1} of the run, expected 1 to 20"):
        SiteExecutor(site, link).run()


def test_a_folder_that_is_no_sites_is_named(tmp_path: Path) -> None:
    shown = isthmus("site", "log", "--state", tmp_path / "none")
    assert shown.code == 2
    assert "no such folder" in shown.err
