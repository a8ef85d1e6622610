"""The models that clients use themselves, where each keeps part of it, or all of it, as its state."""

from __future__ import annotations

from collections.abc import Callable

from numpy import int32
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import UserError, users_code
from isthmus.federated.admission import Form, first_state
from isthmus.federated.algorithms import Algorithm, Values
from isthmus.federated.states import StateLost, States
from isthmus.protocol.federated_messages import NONE


def is_personal(algorithm: Algorithm, model: Tensor) -> bool:
    """Return whether clients use models of their own. UserError for one that is no model."""
    first = first_state(algorithm, model)
    return first is not None and _own(algorithm, model, first) is not None


class OwnModels:
    """Reads clients' states, beside those who write them. A client whose state is lost has the model with which it will
    begin anew, where the algorithm allows that."""

    def __init__(self, algorithm: Algorithm, states: States) -> None:
        self._algorithm = algorithm
        self._states = states
        self._lost: set[tuple[int, int]] = set()  # clients and places of which that was said

    def after(self, model: Tensor, places: NDArray[int32], log: Callable[[str], None]) -> Callable[[int], Tensor]:
        """Each client's, [P], after a round that left the server this model and the clients' states in these places.
        `log` is called once of a state that is lost; UserError where the algorithm cannot do without it."""

        def of(client: int) -> Tensor:
            place = int(places[client])
            kept = None if place == NONE else self._read(client, place, log)
            state = first_state(self._algorithm, model) if kept is None else kept
            own = None if state is None else _own(self._algorithm, model, state)
            return model if own is None else own

        return of

    def _read(self, client: int, place: int, log: Callable[[str], None]) -> Values | None:
        """None where it is lost."""
        try:
            return {name: value[0] for name, value in self._states.read([client], [place]).items()}
        except StateLost as lost:
            if not self._algorithm.state_can_be_lost:
                raise lost.refusal() from None
            if (client, place) not in self._lost:
                self._lost.add((client, place))
                log(f"{lost}; client {client} is evaluated with a new one")
            return None


def _own(algorithm: Algorithm, model: Tensor, state: Values) -> Tensor | None:
    with users_code("algorithm: own_model"):
        own = algorithm.own_model(model, state)
    if own is not None and Form.of(own) != Form.of(model):
        raise UserError(f"algorithm: own_model gives {Form.of(own)}, expected {Form.of(model)}")
    return own
