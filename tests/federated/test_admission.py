"""What the server refuses of an update, and what it makes of one that is too large."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated import (
    Algorithm,
    AlgorithmSpec,
    ClientUpdate,
    Combine,
    LocalTrainer,
    Server,
    Values,
    load_algorithm,
)
from isthmus.federated.admission import AdmissionRules, Form, bounded, forms_of
from isthmus.federated.algorithms import BUFFERS, algorithm_names
from isthmus.protocol.federated_messages import PhaseId, PhaseSetup

MODEL = torch.linspace(-1, 1, 7)
ANY = AdmissionRules()


def opened(name: str = "fedavg", samples: int = 10) -> Server:
    server = Server(load_algorithm(AlgorithmSpec(name=name)), MODEL, {}, 3)
    server.open(PhaseSetup(phase=PhaseId(0), clients=2, samples=samples))
    return server


def delta(value: Tensor | None = None, **others: Tensor) -> ClientUpdate:
    return ClientUpdate(values={"delta": torch.ones(7) if value is None else value, **others})


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_says_what_its_updates_look_like(name: str) -> None:
    algorithm = load_algorithm(AlgorithmSpec(name=name))
    name = f"{BUFFERS}/norm.running_mean"
    found = forms_of(algorithm, {**algorithm.init_server(MODEL), name: torch.zeros(3)})
    for one, forms in zip(algorithm.passes, found, strict=True):
        assert forms.keys() == {*one.returns, name}
        assert forms.pop(name) == Form((3,), torch.float64)
        assert all(form.dtype == torch.float32 for form in forms.values())


class Looks(Algorithm, frozen=True):
    """Looks into its batches."""

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        return ClientUpdate(values={"delta": sum(b["labels"].sum() for b in local.batches()) * broadcast["model"]})


def test_without_a_trial_values_are_as_large_as_the_model() -> None:
    assert forms_of(Looks(), {"model": MODEL}) == [{"delta": Form((7,), torch.float32)}]


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (ClientUpdate(values={}), "sent no value 'delta'"),
        (delta(extra=torch.ones(1)), "sent a value 'extra', expected delta"),
        (delta(torch.ones(8)), r"got float32 \[8\], expected float32 \[7\]"),
        (delta(torch.ones(7, 1)), r"got float32 \[7, 1\]"),
        (delta(torch.ones(7, dtype=torch.float64)), r"got float64 \[7\]"),
        (delta(torch.tensor([1.0] * 6 + [math.nan])), "not all numbers are finite"),
        (delta(torch.tensor([1.0] * 6 + [-math.inf])), "not all numbers are finite"),
        (delta(torch.full((7,), 3e30)), "expected numbers within"),
        (ClientUpdate(values={"delta": torch.ones(7)}, weight=math.nan), "got weight nan, expected 0 to 10"),
        (ClientUpdate(values={"delta": torch.ones(7)}, weight=-1.0), "got weight -1"),
        (
            ClientUpdate(values={"delta": torch.ones(7)}, weight=1e-7),
            r"got weight 1e-07, expected 0, or at least 2\^-20",
        ),
        (ClientUpdate(values={"delta": torch.ones(7)}, weight=11.0), "got weight 11"),
    ],
)
def test_what_is_refused(update: ClientUpdate, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        opened().admit(update, 5, ANY)


@pytest.mark.parametrize("weight", [0.0, 10.0, None])
def test_what_is_admitted_can_be_folded_in(weight: float | None) -> None:
    server = opened()
    server.partial.fold(1, server.admit(ClientUpdate(values={"delta": torch.ones(7)}, weight=weight), 5, ANY), 5)
    server.partial.fold(2, server.admit(delta(), 5, ANY), 5)
    server.absorb()
    assert torch.allclose(server.values["model"], MODEL + 1, atol=1e-9)


def test_a_norm_is_of_all_values_together_and_not_of_running_means() -> None:
    server = opened("scaffold")
    values = {"delta": torch.full((7,), 3.0), "control_delta": torch.full((7,), 4.0)}
    norm = 5 * math.sqrt(7)
    assert server.admit(ClientUpdate(values=values), 5, AdmissionRules(max_norm=norm * 1.0001)).values is values
    with pytest.raises(PeerError, match=r"an update of norm 13\.23, expected at most 10"):
        server.admit(ClientUpdate(values=values), 5, AdmissionRules(max_norm=10.0))
    clipped = server.admit(ClientUpdate(values=values), 5, AdmissionRules(max_norm=norm / 2, clip=True)).values
    assert torch.allclose(clipped["delta"], torch.full((7,), 1.5))
    assert torch.allclose(clipped["control_delta"], torch.full((7,), 2.0))


def nova(direction: float, steps: float) -> ClientUpdate:
    return ClientUpdate(values={"direction": torch.full((7,), direction), "steps": torch.tensor([steps])})


def test_a_norm_is_of_the_models_change_and_not_of_its_number_of_steps() -> None:
    """FedNova's change is the direction times the steps, as long as FedAvg's of the same client."""
    server, length = opened("fednova"), 50 * 0.01 * math.sqrt(7)
    update = nova(0.01, 50.0)
    assert server.admit(update, 5, AdmissionRules(max_norm=length * 1.0001)).values is update.values
    with pytest.raises(PeerError, match=r"an update of norm 1\.323, expected at most 1"):
        server.admit(update, 5, AdmissionRules(max_norm=1.0))
    clipped = server.admit(update, 5, AdmissionRules(max_norm=length / 2, clip=True)).values
    assert clipped["steps"].tolist() == [50.0]
    assert torch.allclose(clipped["direction"], torch.full((7,), 0.005))
    with pytest.raises(PeerError, match="an update of norm"):
        server.admit(nova(9.0, 0.0), 5, AdmissionRules(max_norm=1.0))  # fewer steps than one hide nothing


def test_a_client_states_no_more_steps_than_it_was_asked_for() -> None:
    """They scale the others' directions too, so that no norm of its own change bounds what they do."""
    server = opened("fednova")
    assert server.admit(nova(0.01, 50.0), 5, ANY, 50).values["steps"].tolist() == [50.0]
    for steps in (51.0, -1e6):
        with pytest.raises(PeerError, match=r"value 'steps': got .*, expected at most 50 of a client of 50 steps"):
            server.admit(nova(1e-9, steps), 5, ANY, 50)


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9),
    st.floats(1e-3, 1e3),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_is_clipped_is_within_the_norm_whatever_its_numbers_are_rounded_to(
    numbers: list[float], most: float, dtype: torch.dtype
) -> None:
    rules = AdmissionRules(max_norm=most, clip=True)
    update = ClientUpdate(values={"delta": torch.tensor(numbers).clamp(-6e4, 6e4).to(dtype)})
    once = bounded(update, rules)
    assert float(once.values["delta"].double().norm()) <= most
    assert bounded(once, rules) is once
