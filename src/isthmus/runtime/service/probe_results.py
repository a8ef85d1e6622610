"""A device's figures from a probe: those that plans go by, and those that are shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec

from isthmus.fleet import Measurement
from isthmus.job.settings import Precision
from isthmus.runtime.messages.probe import SpeedSample
from isthmus.units import significant

HALVES: tuple[Precision, ...] = ("bf16", "fp16")


def combined_speed(ranks: Sequence[Sequence[SpeedSample]], machines: float) -> tuple[SpeedSample, ...]:
    """Return the figures of one device from those of its ranks, whose speeds add up; `machines` are so many as these.
    Kinds that not all ranks have measured are left out, and the figure of the fewest layers counts."""
    by_kind: defaultdict[tuple[str, Precision], list[SpeedSample]] = defaultdict(list)
    for figure in (figure for figures in ranks for figure in figures):
        by_kind[figure.what, figure.precision].append(figure)
    found: list[SpeedSample] = []
    for same in by_kind.values():
        if len(same) == len(ranks):
            one = min(same, key=lambda figure: figure.operators)
            speed = machines * sum(figure.flops_per_s for figure in same)
            found.append(msgspec.structs.replace(one, seconds=one.flops / speed))
    return tuple(found)


def planned_speed(figures: Sequence[SpeedSample], width: Literal["full", "half"]) -> float:
    """FLOP/s that plans go by, in fp32 or in one of its halves; 0 where nothing was measured in it.

    A stage of the model itself counts before its products and attention: it has all other operators too, the backward,
    and what it takes to call them. Those count by the time that they take together.
    """
    wanted = [figure for figure in figures if (figure.precision in HALVES) == (width == "half")]
    layers = [figure for figure in wanted if figure.what == "layers"]
    counted = layers or wanted
    return sum(f.flops for f in counted) / sum(f.seconds for f in counted) if counted else 0.0


def measurements_of(figures: Sequence[SpeedSample], operators: int) -> tuple[Measurement, ...]:
    """For people; `operators` are those of the whole model."""
    return tuple(Measurement(_named(f, operators), significant(f.flops_per_s)) for f in figures)


def _named(figure: SpeedSample, operators: int) -> str:
    what = extent(figure.operators, operators) if figure.what == "layers" else figure.what
    return f"{what} in {figure.precision}"


def extent(operators: int, whole: int) -> str:
    """Return the text that says which layers are measured."""
    return f"all {whole} operators" if operators == whole else f"the first {operators} of {whole} operators"
