"""What is compared: a model, clients' samples, cohorts and orders, written to a folder that every side reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from networks import NETWORKS
from numpy.typing import NDArray
from task import weights_of

from isthmus.data import DataSpec, load_dataset
from isthmus.data.femnist import FemnistOptions, FemnistShaped
from isthmus.protocol.federated_participation import Participation, cohort
from isthmus.rng import orders, stream

SEED = 0
Samples = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]
"""Pixels, labels, and samples of each client."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`rounds` are those that are timed, the first one included; memory is taken in `memory_rounds`."""

    network: str
    clients: int
    clients_a_round: int
    rounds: int
    memory_rounds: int
    epochs: int
    data: Callable[[int], Samples]
    repeats: int = 2
    batch_size: int = 20
    learning_rate: float = 0.05


def digits(clients: int) -> Samples:
    """1,797 of them, as evenly as they go."""
    whole = load_dataset(DataSpec(kind="digits", options={"flat": True, "holdout": 0.0}), "train")
    columns = whole.batch(stream(SEED, "partition").permutation(len(whole)), ["pixel_values", "labels"])
    sizes = np.full(clients, len(whole) // clients)
    sizes[: len(whole) % clients] += 1
    return columns["pixel_values"].numpy(), columns["labels"].numpy(), sizes


def many_digits(clients: int) -> Samples:
    """20 digits each, drawn with repetition: there are not enough for 10,000 clients."""
    whole = load_dataset(DataSpec(kind="digits", options={"flat": True, "holdout": 0.0}), "train")
    drawn = stream(SEED, "partition").integers(len(whole), size=20 * clients)
    columns = whole.batch(drawn, ["pixel_values", "labels"])
    return columns["pixel_values"].numpy(), columns["labels"].numpy(), np.full(clients, 20)


def written(options: FemnistOptions) -> Samples:
    data = FemnistShaped(options)
    parts = [data.load(client) for client in range(options.writers)]
    pixels, labels = (np.concatenate([p[name].numpy() for p in parts]) for name in ("pixel_values", "labels"))
    return pixels, labels, data.sizes


WORKLOADS: dict[str, Workload] = {
    "MLP, 100 clients": Workload(
        network="mlp", clients=100, clients_a_round=10, rounds=80, memory_rounds=2, epochs=2, data=digits
    ),
    "MLP, 1,000 clients": Workload(
        network="mlp", clients=1000, clients_a_round=100, rounds=30, memory_rounds=2, epochs=2, data=digits
    ),
    "MLP, 10,000 clients": Workload(
        network="mlp", clients=10_000, clients_a_round=100, rounds=15, memory_rounds=2, epochs=2, data=many_digits
    ),
    "CNN": Workload(
        network="cnn",
        clients=100,
        clients_a_round=20,
        rounds=6,
        memory_rounds=2,
        epochs=1,
        data=lambda clients: written(FemnistOptions(writers=clients, deviation=180.0)),
    ),
    "ResNet-18": Workload(
        network="resnet18",
        clients=50,
        clients_a_round=10,
        rounds=6,
        memory_rounds=2,
        epochs=1,
        data=lambda clients: written(FemnistOptions(writers=clients, mean=24, deviation=8, smallest=10, largest=40)),
    ),
}


def write(workload: Workload, folder: Path) -> None:
    """Everything that `Task` reads, and the same samples as Isthmus takes them."""
    pixels, labels, sizes = workload.data(workload.clients)
    np.save(folder / "pixels.npy", pixels)
    np.save(folder / "labels.npy", labels)
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(sizes)]))
    owner = np.repeat(np.arange(workload.clients), sizes)
    np.savez(folder / "samples.npz", pixel_values=pixels, labels=labels, client=owner)
    rules = Participation(clients=workload.clients_a_round)
    cohorts = [cohort(rules, sizes, SEED, round_) for round_ in range(workload.rounds)]
    np.save(folder / "cohorts.npy", np.stack(cohorts))
    shuffled: list[NDArray[np.int64]] = []
    for round_, members in enumerate(cohorts):
        for client in members.tolist():
            shuffled.append(orders(SEED, round_, [client], int(sizes[client]), workload.epochs).reshape(-1))
    np.save(folder / "orders.npy", np.concatenate(shuffled))
    np.save(folder / "order_offsets.npy", np.cumsum([0, *map(len, shuffled)]))
    torch.manual_seed(SEED)
    np.save(folder / "weights.npy", weights_of(NETWORKS[workload.network]()).numpy())
    settings = {
        name: getattr(workload, name)
        for name in ("network", "rounds", "epochs", "batch_size", "learning_rate", "clients_a_round")
    }
    (folder / "settings.json").write_bytes(msgspec.json.encode({**settings, "seed": SEED}))
