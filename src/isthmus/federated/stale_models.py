"""Updates that were made from a model of some rounds before (FedBuff: Nguyen et al. 2022), and those models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from isthmus.federated.algorithms import BUFFERS, ClientUpdate, Values

_BEFORE = "before-"


def with_stale_models(now: Mapping[str, Tensor], past: Sequence[Mapping[str, Tensor]]) -> Values:
    """As one: `past` are those of one round before, of two, and so on."""
    found = dict(now)
    for late, values in enumerate(past, 1):
        found |= {f"{_BEFORE}{late}/{name}": value for name, value in values.items()}
    return found


def without_stale_models(values: Mapping[str, Tensor]) -> tuple[Values, list[Values]]:
    """The two that `with_stale_models` was given."""
    now: Values = {}
    past: dict[int, Values] = {}
    for key, value in values.items():
        late, _, name = key.removeprefix(_BEFORE).partition("/")
        if key.startswith(_BEFORE) and late.isdecimal():
            past.setdefault(int(late), {})[name] = value
        else:
            now[key] = value
    return now, [past[late] for late in sorted(past)]


def staleness_weight(update: ClientUpdate, late: int, *, rows: bool = False) -> ClientUpdate:
    """FedBuff's s(tau) = 1 / sqrt(1 + tau), on the values: they count among the others, for less. Running means are no
    changes, and stay; so do single numbers beside a change (FedNova's steps, a loss), which say how large it is to be
    taken: it would be scaled twice. With `rows` the first dim of values is of clients."""
    if not late:
        return update
    share = 1 / math.sqrt(1 + late)
    numbers = {name: math.prod(value.shape[int(rows) :]) for name, value in update.values.items() if name != BUFFERS}
    change = max(numbers.values(), default=0)
    values = {
        name: value if name == BUFFERS or numbers[name] == 1 < change else value * share
        for name, value in update.values.items()
    }
    return ClientUpdate(values=values, state=update.state, weight=update.weight)
