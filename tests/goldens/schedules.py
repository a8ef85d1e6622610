"""How each of the 2,200 fault schedules of each program ends, by block (`tests/faults/test_schedules.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from isthmus.errors import IsthmusError
from tests.faults import merges_schedules, pipeline_schedules, queue_schedules, rounds_schedules, tokens_schedules

SEEDS = 2200


class Schedules(NamedTuple):
    """The schedules of one program."""

    drawn: Callable[[int], Any]  # the run of a seed, at its end; AssertionError where it violates something
    line: Callable[[Any], str]  # how it ended
    check_harm: Callable[[Sequence[Any]], None]  # AssertionError where faults of the first block change too little
    blocks: int = 10


PROGRAMS = {
    "pipeline": Schedules(pipeline_schedules.drawn_run, pipeline_schedules.line, pipeline_schedules.check_harm),
    "rounds": Schedules(rounds_schedules.drawn, rounds_schedules.line, rounds_schedules.check_harm),
    "merges": Schedules(merges_schedules.drawn, merges_schedules.line, merges_schedules.check_harm),
    "tokens": Schedules(tokens_schedules.drawn, tokens_schedules.line, tokens_schedules.check_harm, blocks=50),
    "queue": Schedules(queue_schedules.drawn, queue_schedules.line, queue_schedules.check_harm),
}


CASES = [(program, block) for program, found in PROGRAMS.items() for block in range(found.blocks)]


def simulated(program: str, block: int) -> Iterator[Any]:
    """The block's runs, each at its end. AssertionError names the seed of a violation."""
    each = SEEDS // PROGRAMS[program].blocks
    for seed in range(block * each, (block + 1) * each):
        try:
            yield PROGRAMS[program].drawn(seed)
        except (AssertionError, IsthmusError) as e:
            raise AssertionError(f"seed {seed}: {e}") from e


def digest(program: str, runs: Sequence[Any]) -> str:
    """Hash of how each ended."""
    return hashlib.sha256("\n".join(map(PROGRAMS[program].line, runs)).encode()).hexdigest()
