"""Who has which samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.data.femnist import FemnistOptions, FemnistShaped
from isthmus.data.partition import Partition, PartitionSpec, partition
from isthmus.errors import UserError

LABELS = np.random.default_rng(0).integers(0, 10, 600)


def share(scheme: str, clients: int | None, seed: int = 0, **options: object) -> Partition:
    spec = PartitionSpec(scheme=scheme, clients=clients, **options)
    return partition(spec, len(LABELS), {"labels": LABELS, "client": LABELS * 3}, seed)


@given(
    scheme=st.sampled_from(["iid", "dirichlet", "quantity", "shards"]),
    clients=st.integers(1, 200),
    alpha=st.floats(0.01, 10),
    seed=st.integers(0, 5),
)
def test_every_sample_has_one_owner_and_every_client_one_sample(
    scheme: str, clients: int, alpha: float, seed: int
) -> None:
    parts = share(scheme, clients, seed, alpha=alpha)
    assert sorted(parts.order.tolist()) == list(range(len(LABELS)))
    assert parts.sizes.min() >= 1
    assert parts.clients == clients
    again = share(scheme, clients, seed, alpha=alpha)
    assert (again.order == parts.order).all()


def test_dirichlet_is_skewed_by_label_and_iid_is_not() -> None:
    def largest_share(parts: Partition) -> float:
        counts = [np.bincount(LABELS[parts.samples(c)], minlength=10) for c in range(parts.clients)]
        return float(np.mean([c.max() / c.sum() for c in counts]))

    assert largest_share(share("dirichlet", 20, alpha=0.1)) > 0.5 > 0.35 > largest_share(share("iid", 20))


def test_quantity_is_skewed_by_size() -> None:
    assert share("quantity", 20, alpha=0.5).sizes.max() > 3 * share("iid", 20).sizes.max()


def test_shards_give_few_labels() -> None:
    parts = share("shards", 30, shards=2)
    assert max(len(np.unique(LABELS[parts.samples(c)])) for c in range(30)) <= 4


def test_a_column_says_whose_a_sample_is() -> None:
    parts = share("natural", None)
    assert parts.clients == 10
    assert all(len(np.unique(LABELS[parts.samples(c)])) == 1 for c in range(10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "iid", "clients": 601}, "got 601, expected at most the 600 samples"),
        ({"scheme": "iid", "clients": None}, "federated.partition.clients: missing"),
        ({"scheme": "dirichlet", "clients": 3, "label": "kind"}, "no column 'kind'"),
        ({"scheme": "natural", "clients": None, "column": "writer"}, "no column 'writer'"),
        ({"scheme": "shards", "clients": 400, "shards": 2}, "got 800 shards"),
    ],
)
def test_what_cannot_be_shared_out(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        share(**options)


def test_femnist_shaped_sizes_follow_leaf() -> None:
    data = FemnistShaped(FemnistOptions())
    assert len(data.sizes) == 3400
    assert abs(data.sizes.mean() - 226.83) < 8
    assert abs(data.sizes.std() - 88.94) < 8
    assert data.sizes.min() >= 10


def test_a_writers_samples_are_the_same_every_time_and_nobody_elses() -> None:
    data, again = FemnistShaped(FemnistOptions(writers=50)), FemnistShaped(FemnistOptions(writers=50))
    first, second = data.load(7), again.load(7)
    assert first["pixel_values"].shape == (data.sizes[7], 1, 28, 28)
    assert (first["pixel_values"] == second["pixel_values"]).all()
    assert not (first["pixel_values"][:5] == data.load(8)["pixel_values"][:5]).all()
    held = data.held_out(50)
    assert held["labels"].shape == (50,)
    assert held["labels"].max() < 62
