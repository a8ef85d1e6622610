"""The checker of real runs finds what it is there for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from isthmus.protocol import Item

from .history import History
from .rows import differing

BATCH = 8


def _told(*words: str) -> History:
    """`2` is a step's end, `<2` a rollback to it, `=2` a snapshot of it, `2@5` a step with samples from 5 on."""
    history = History()
    for word in words:
        kinds: dict[str, Callable[[int], None]] = {"<": history.rolled_back, "=": history.held, "!": history.saved}
        if word == "x":
            history.struck()
        elif word[0] in kinds:
            kinds[word[0]](int(word[1:]))
        else:
            step, _, first = word.partition("@")
            item = Item(index=0, kind="train", step=int(step), first_sample=int(first or int(step) * BATCH))
            history.advanced(item)
    return history


@pytest.mark.parametrize(
    "words",
    [
        "0 1 2 3",
        "0 1 =2 2 x <2 2 3",
        "0 1 !2 2 3 x <2 2 3",
        "0 x <3 3",  # the state of step 3 was held, its loss is not known
        "0 1 =2 2 <2 2 x <2 2 3",
    ],
)
def test_what_holds(words: str) -> None:
    assert _told(*words.split()).violation(4, BATCH) == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("0 1 2", "after 3 steps of 4"),
        ("0 1 3", "step 3 came where 2 was due"),
        ("0 1 1 2 3", "step 1 came where 2 was due"),
        ("0 1 2@8 3", "took samples from 8 on, not from 16"),
        ("0 1 =2 2 x <1 1 2 3", "back to step 1, and 2 was held"),
        ("0 1 !2 2 x <0 0 1 2 3", "back to step 0, and 2 was held"),
        ("0 1 2 x <2 3", "step 3 came where 2 was due"),
        ("0 =2 1 2 3", "step 2 is held, and only 1 are done"),
    ],
)
def test_what_does_not(words: str, said: str) -> None:
    assert said in _told(*words.split()).violation(4, BATCH)


def test_two_devices_may_take_a_snapshot_with_them() -> None:
    history = _told(*["0", "1", "=2", "2", "x", "x", "<0", "0", "1", "2", "3"])
    assert history.violation(4, BATCH) and not history.violation(4, BATCH, losses=2)


def test_a_recovery_counts_from_the_fault() -> None:
    assert _told(*["0", "1", "2", "3"]).recovered_s() == []
    history = _told(*["0", "x", "<0", "<0", "0", "1", "<1", "1", "2", "3"])
    times = {i: float(i) for i in range(len(history.events))}
    history.events = [event._replace(time_s=times[i]) for i, event in enumerate(history.events)]
    assert history.recovered_s() == [3.0, 1.0]


def test_weights_that_differ() -> None:
    weights = {"a": torch.ones(2), "b": torch.zeros(0)}
    near, far = ({"a": torch.ones(2) + by, "b": torch.zeros(0)} for by in (1e-6, 1e-3))
    assert differing(weights, weights, bitwise=True) == ""
    assert differing(near, weights, bitwise=False) == "" != differing(near, weights, bitwise=True)
    assert "1.0e-03" in differing(far, weights, bitwise=False)
    assert "nan" in differing({**weights, "a": torch.full((2,), torch.nan)}, weights, bitwise=False)
    assert "['b']" in differing({"a": torch.ones(2)}, weights, bitwise=False)
