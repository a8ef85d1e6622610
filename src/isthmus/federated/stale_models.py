"""Updates that were made from a model of some rounds before (FedBuff: Nguyen et al. 2022), and those models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from isthmus.federated.algorithms import ClientUpdate, Values
from isthmus.federated.algorithms.algorithm import changes_of
from isthmus.federated.buffers import is_buffer

_BEFORE = "before-"


def with_stale_models(now: Mapping[str, Tensor], past: Sequence[Mapping[str, Tensor]]) -> Values:
    """Return the broadcast and `past`, those of one round before, of two, and so on, as one."""
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
    """FedBuff's s(tau) = 1 / sqrt(1 + tau), on the values: they count among the others, for less. Single numbers beside
    a change (FedNova's steps, a loss) stay, as they say how large it is to be taken: it would be scaled twice. Changes
    of buffers are scaled as those of the model. With `rows` the first dim of values is of clients."""
    if not late:
        return update
    share = 1 / math.sqrt(1 + late)
    changes = changes_of(update.values, int(rows))
    values = {
        name: value * share if name in changes or is_buffer(name) else value for name, value in update.values.items()
    }
    return ClientUpdate(values=values, state=update.state, weight=update.weight)
