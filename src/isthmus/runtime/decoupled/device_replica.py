"""A replica on one device: the merger is where the run's coordinator is, and says what to train.

Nothing of the job is code here: the model comes as a graph, and the data are those that the device's owner allows.
"""

from __future__ import annotations

import math

import torch

from isthmus.accelerators import open_accelerator
from isthmus.combinations import refused
from isthmus.errors import PeerError
from isthmus.runtime.decoupled.graph_trainer import GraphTrainer, check_order
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaPlace
from isthmus.runtime.decoupled.replica import train_replica
from isthmus.runtime.device.coordinator_link import AWAY_TIMEOUTS, unfollowable
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.device.stage_data import stage_data
from isthmus.runtime.device.stage_preparation import check_operators
from isthmus.runtime.messages.decoupled import TrainReplica
from isthmus.runtime.processes.memory import tune_process


def serve_replica(coordinator: tuple[str, int], site: Endpoint, run: str, timeout_s: float) -> None:
    """Train as one replica until the merger ends the run, or stays away. UserError for data that the merger may not
    name, or that have changed; the merger gets it too."""
    host, port = coordinator
    place = ReplicaPlace(
        name=site.device,
        run=run,
        address=f"{host}:{port}",
        timeout_s=timeout_s,
        link=site.merger,
        identity=site.identity,
        # A process of this machine ends with the merger's, however long it was stopped.
        away_timeout_s=math.inf if site.identity is None else AWAY_TIMEOUTS * timeout_s,
    )
    link = MergerLink(place)
    with link.reporting():
        trainer = _assigned(link, site)
        tune_process()
        train_replica(trainer, link, site.step_s)


def _assigned(link: MergerLink, site: Endpoint) -> GraphTrainer:
    """Return the trainer that the merger's first order asks for; one that cannot be followed is refused once. PeerError
    for the second, and where the merger cannot be reached."""
    refused = False
    while True:
        order, tensors = link.assigned()
        kept = {header.name: tensor for header, tensor in zip(order.tensors, tensors, strict=True)}
        try:
            check_order(order, kept)
            return _trainer(order, kept, site)
        except Exception as e:
            if refused or not isinstance(error := unfollowable(e, order), PeerError):
                raise
            refused = True
            link.refuse_order(error)


def _trainer(order: TrainReplica, kept: dict[str, torch.Tensor], site: Endpoint) -> GraphTrainer:
    if site.island is not None or site.engine != "torch":
        got = f"{site.ranks} ranks" if site.island is not None else f"engine {site.engine!r}"
        raise refused("several ranks, JAX", "joined replicas", got)
    torch.set_num_threads(order.assignment.threads)
    check_operators(order.assignment, site.engine)
    foreign = site.identity is not None
    data = stage_data(order.assignment, site.data_key, foreign=foreign, kinds=site.data_kinds)
    return GraphTrainer(order, kept, data["train"], open_accelerator(site.accelerator))
