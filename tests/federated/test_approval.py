"""A site's owner: rules of the site's file, a word for each run, and a log of what left."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from isthmus import api
from isthmus.errors import UserError
from isthmus.federated.algorithms import AlgorithmSpec
from isthmus.federated.approval import described, digest_of, refusal
from isthmus.federated.local import LocalConfig
from isthmus.federated.privacy import Privacy
from isthmus.federated.robust import Aggregation
from isthmus.federated.site_log import SiteLog, SiteLogLine
from isthmus.federated.task_spec import Approval, TaskSpec
from isthmus.models import ModelSpec
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
    assert "no promise" in plain


def test_an_answer_holds_for_the_same_request_alone() -> None:
    assert digest_of(msgspec.structs.replace(ASKED, epsilon_so_far=2.0)) == digest_of(ASKED)
    for change in ({"rounds": 21}, {"sites": ("north", "east")}, {"aggregation": Aggregation()}):
        assert digest_of(msgspec.structs.replace(ASKED, **change)) != digest_of(ASKED)


def test_the_owners_word_is_written_down_and_counts_last(tmp_path: Path) -> None:
    site_log = SiteLog(tmp_path)
    with pytest.raises(UserError, match="nothing waits for an answer"):
        api.site.answer(tmp_path, yes=True)
    site_log.note("asked", "clinics", "run", described(ASKED), request="first")
    assert isthmus("site", "yes", "--state", tmp_path).code == 0
    assert site_log.answer("first") is True
    site_log.note("asked", "clinics", "run", described(ASKED), request="second")
    assert site_log.answer("second") is None
    assert isthmus("site", "no", "--state", tmp_path).code == 0
    assert (site_log.answer("first"), site_log.answer("second")) == (True, False)
    site_log.add(SiteLogLine(time_s=0.0, event="sent", job="clinics", run="run", text="the update", size_bytes=800))
    shown = isthmus("site", "log", "--state", tmp_path)
    assert shown.code == 0
    assert "by the owner" in shown.out
    assert "the update" in shown.out


def test_a_folder_that_is_no_sites_is_named(tmp_path: Path) -> None:
    shown = isthmus("site", "log", "--state", tmp_path / "none")
    assert shown.code == 2
    assert "no such folder" in shown.err
