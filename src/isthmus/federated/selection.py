"""The user's own function that chooses the clients of a round, in place of a draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import numpy as np

from isthmus.errors import IsthmusError, UserError
from isthmus.extensions import import_object
from isthmus.protocol.federated_participation import Choose, Integers, Participation

FIELD = "federated.participation.select"


def chooser(rules: Participation) -> Choose | None:
    """Return what chooses clients; None where they are drawn. UserError for a name of no function, and, when
    it is called, for a function that fails or chooses what it must not."""
    if rules.select is None:
        return None
    if rules.weighted or rules.poisson:
        other = "weighted" if rules.weighted else "poisson"
        raise UserError(f"federated.participation: got select and {other}, expected one of them")
    function = import_object(FIELD, rules.select)
    if not callable(function):
        raise UserError(f"{FIELD}: got {rules.select!r}, expected a function")
    own = cast("Callable[..., Iterable[int]]", function)

    def choose(round_: int, among: Integers, samples: Integers, wanted: int, draws: np.random.Generator) -> Integers:
        if wanted == 0:
            return among[:0]
        try:
            found = [int(client) for client in own(round_, among.copy(), samples, wanted, draws)]
        except IsthmusError:
            raise
        except Exception as e:  # the user's own code
            raise UserError(f"{FIELD}: {rules.select} raised {type(e).__name__}: {e}") from e
        if not 1 <= len(set(found)) == len(found) <= wanted or not set(found) <= set(among.tolist()):
            what = f"expected 1 to {wanted} of the clients that it was given, each once"
            raise UserError(f"{FIELD}: {rules.select} chose {found!s:.80} in round {round_}, {what}")
        return np.array(found, dtype=np.int64)

    return choose
