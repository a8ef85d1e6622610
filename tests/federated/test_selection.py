"""Clients of a round that a function of the user's own chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.api.rounds import simulate_rounds
from isthmus.errors import UserError
from isthmus.federated.cohorts import chooser
from isthmus.federated.evaluation import RoundHistory
from isthmus.federated.job import load_federated_job
from isthmus.programs.open_phase import RoundRecord
from isthmus.protocol.federated_participation import Buffer, Integers, Participation, cohort
from tests.federated.test_federated_runs import model, write
from tests.runtime.commands import isthmus, refused

HERE = "tests.federated.test_selection"
SIZES = np.arange(1, 13)


def largest(round_: int, clients: Integers, samples: Integers, count: int, draws: np.random.Generator) -> Integers:
    """Half of them, the largest; the others drawn, of those with even numbers in even rounds."""
    first = clients[np.argsort(-samples, kind="stable")][: (count + 1) // 2]
    others = np.setdiff1d(clients[clients % 2 == round_ % 2], first)
    return np.concatenate([first, draws.permutation(others)[: count - len(first)]])


def bad(round_: int, clients: Integers, samples: Integers, count: int, draws: np.random.Generator) -> Sequence[Any]:
    wrong: list[Sequence[Any]] = [[], [1, 1], [99], list(range(8)), ["one"]]
    return wrong[round_]


def chosen(round_: int, **options: Any) -> list[int]:
    rules = Participation(clients=4, select=f"{HERE}:largest", **options)
    return cohort(rules, SIZES, 7, round_, choose=chooser(rules)).tolist()


def test_the_users_function_chooses() -> None:
    for round_ in range(6):
        assert {10, 11} <= set(found := chosen(round_)) and found == sorted(found) == chosen(round_)
        assert len(found) == 4 and all(client % 2 == round_ % 2 for client in found if client < 10)
    assert len({tuple(chosen(round_)) for round_ in range(0, 6, 2)}) > 1, "the generator is the round's"
    assert len(chosen(0, over_select=2.0)) == 8
    assert set(chosen(0, min_samples=9)) <= {8, 9, 10, 11}
    assert set(chosen(0, dropout=0.5)) < set(chosen(0))
    rules = Participation(clients=4, select=f"{HERE}:largest")
    assert cohort(rules, SIZES, 7, 0, np.array([2, 4]), chooser(rules)).tolist() == [2, 4]
    assert not len(cohort(rules, SIZES, 7, 0, SIZES[:0], chooser(rules)))


def test_where_rounds_overlap_it_chooses_each_that_begins() -> None:
    rules = Participation(clients=4, staleness=2, select=f"{HERE}:largest")
    seen = {client for round_ in range(4) for client in Buffer(rules, SIZES, 0, choose=chooser(rules)).round(round_)}
    assert min(seen) > 3, "one that is free is the largest of those"


@pytest.mark.parametrize(
    ("round_", "words"),
    [
        (0, r"chose \[\] in round 0, expected 1 to 4 of the clients that it was given, each once"),
        (1, r"chose \[1, 1\]"),
        (2, r"chose \[99\]"),
        (3, "chose .* in round 3"),
        (4, "raised ValueError"),
        (5, "raised IndexError"),
    ],
)
def test_what_it_must_not_choose_ends_the_run_in_one_line(round_: int, words: str) -> None:
    rules = Participation(clients=4, select=f"{HERE}:bad")
    with pytest.raises(UserError, match=rf"federated\.participation\.select: {HERE}:bad {words}"):
        cohort(rules, SIZES, 0, round_, choose=chooser(rules))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'select = "{HERE}:HERE"', "expected a function"),
        (f'select = "{HERE}:none"', "has no 'none'"),
        (f'select = "{HERE}:largest"\nweighted = true', "got select and weighted, expected one of them"),
        (f'select = "{HERE}:largest"\npoisson = true', "got select and poisson, expected one of them"),
    ],
)
def test_what_cannot_choose_is_refused_before_the_run(text: str, words: str, tmp_path: Path) -> None:
    job = write(tmp_path, ("clients = 6", f"clients = 6\n{text}"))
    refused(isthmus("train", job), 2, "federated.participation", words)


def test_it_chooses_in_every_scheme_and_in_a_simulation(tmp_path: Path) -> None:
    job_file = write(tmp_path, ("clients = 6", f'clients = 6\nselect = "{HERE}:largest"'))
    for scheme in ("sp", "ours"):
        done = isthmus("train", job_file, "--scheme", scheme, "--run", tmp_path / scheme)
        assert done.code == 0, done.err
    assert model(tmp_path / "sp") == model(tmp_path / "ours")
    simulated = [who(r.record) for r in simulate_rounds(load_federated_job(job_file)).rounds]
    lines = list(RoundHistory.of(tmp_path / "ours").lines())
    assert [who(line.record) for line in lines] == simulated
    rest = set(range(12)).intersection(*simulated)
    assert len(rest) >= 3, "the largest are in every round"
    for round_, clients in enumerate(simulated):
        assert len(clients) == 6 and sum(client % 2 == round_ % 2 for client in clients) >= 3


def who(record: RoundRecord) -> set[int]:
    return {timed.client for executor in record.trained.values() for timed in executor}
