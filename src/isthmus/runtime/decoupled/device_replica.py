"""A replica on one device: the merger is where the run's coordinator is, and says what to train.

Nothing of the job is code here: the model comes as a graph, and the data are those that the device's owner allows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.accelerators import Accelerator, open_accelerator
from isthmus.accelerators.copies import to_device
from isthmus.combinations import refused
from isthmus.data import Dataset
from isthmus.data.replica_share import MOST_STEPS
from isthmus.engines import EngineName
from isthmus.errors import PeerError
from isthmus.graph import Ref
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaPlace, train_replica
from isthmus.runtime.device.coordinator_link import AWAY_TIMEOUTS, unfollowable
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.device.stage_data import stage_data
from isthmus.runtime.device.stage_preparation import check_operators
from isthmus.runtime.messages.decoupled import MOST_NOTE, ReplicaNote, TrainReplica
from isthmus.runtime.processes.memory import machine_memory_bytes, tune_process
from isthmus.training.compiled import compile_where_it_pays
from isthmus.training.decoupled import ReplicaFragments, delta_codec
from isthmus.training.engine import TorchEngine
from isthmus.training.jax import compute_by_jax


def check_order(order: TrainReplica, kept: Mapping[str, Tensor]) -> None:
    """Before anything is allocated or read. PeerError for what no merger orders; `kept` came with it."""
    share, engine = order.assignment.replica, order.assignment.engine
    if share is None:
        raise PeerError("ordered no share of the samples")
    if order.assignment.train_samples != share.samples or order.steps >= MOST_STEPS:
        raise PeerError(f"ordered step {order.steps} of {order.assignment.train_samples} samples, {share.own} each")
    if engine.micro_batches * engine.micro_batch_size != share.own or engine.steps < 1:
        sizes = f"{engine.micro_batches} micro-batches of {engine.micro_batch_size} samples"
        raise PeerError(f"ordered {engine.steps} steps of {sizes}, expected {share.own} samples a step")
    shapes = {name: shape for fragment in order.fragments for name, shape in fragment.items()}
    if order.rules.fragments != len(order.fragments) or len(shapes) != sum(map(len, order.fragments)):
        raise PeerError(f"ordered {len(order.fragments)} fragments, expected {order.rules.fragments}, a name in one")
    if 4 * sum(map(math.prod, shapes.values())) > machine_memory_bytes():
        raise PeerError("ordered fragments that are larger than this machine's memory")
    given = {name: tuple(tensor.shape) for name, tensor in kept.items()} | shapes
    for op in order.assignment.train.variables():
        if (got := given.get(op.target)) != (expected := op.outputs[0].shape_at(engine.micro_batch_size)):
            raise PeerError(f"ordered {op.target} of shape {got}, the graph has {expected}")


class GraphTrainer:
    """The trainer of the replica that received the order. Its parameters are zeros until the merger's versions are
    taken."""

    def __init__(
        self, order: TrainReplica, kept: Mapping[str, Tensor], dataset: Dataset, accelerator: Accelerator
    ) -> None:
        """`kept` are the variables that are not trained, by the module's own names; `dataset` has the replica's
        samples. PeerError for fragments that are not the graph's."""
        assignment = order.assignment
        assert assignment.replica is not None, "it was checked"
        self.samples, self.batch, self.steps = assignment.replica.own, assignment.replica.batch, order.steps
        self._assignment, self._config, self._data = assignment, assignment.engine, dataset
        self._leaves_out = self._config.non_finite == "skip" or self._config.loss_scaling is not None
        """Whether a step whose gradients are not finite changes nothing."""
        if note := self._config.kernels.use(accelerator):
            print(f"device {assignment.device}: {note}", file=sys.stderr, flush=True)
        trained = {name: torch.zeros(shape) for fragment in order.fragments for name, shape in fragment.items()}
        self._engine = TorchEngine(
            assignment.train, assignment.evaluation, self._config, {**kept, **trained}, accelerator=accelerator
        )
        names = self._engine.trainable
        held = {names[op]: value for op, value in self._engine.parameters(list(names)).items()}
        if strange := held.keys() - trained.keys():
            raise PeerError(f"named no fragment with {', '.join(sorted(strange))}")
        self.fragments = ReplicaFragments(
            [[held.get(name, trained[name]) for name in fragment] for fragment in order.fragments],
            delta_codec(order.rules),
        )

    def step(self, samples: int) -> float:
        """One step, where all replicas had trained on so many samples; returns the loss."""
        engine, config = self._engine, self._config
        engine.set_parameters({})  # where it computes in half, with what was taken
        for number in range(config.micro_batches):
            engine.forward(self.steps, number, self._columns(self.steps * self.samples, number))
            engine.backward(number, [])
        counts = self._assignment.train.count is not None
        norms = engine.collect(engine.count(self.steps) if counts else None)
        if self._leaves_out and not bool(torch.isfinite(norms).all()):
            engine.skip_update()
        else:
            engine.update(min(samples // self.batch, config.steps - 1), norms)
        self.steps += 1
        self.fragments.account.trained(self.samples)
        loss, count = engine.take_loss() or (0.0, 0.0)
        return loss / (count or 1.0)

    def compile(self, by: EngineName) -> str:
        """Compute by JAX, if the device does, or compiled, if the job asks for it and it pays. Return a line for
        people: empty where torch computes operator by operator. UserError as of `compute_by_jax`."""
        columns = self._columns(self.steps * self.samples, 0)
        if by == "jax":
            return compute_by_jax(self._engine, columns)
        return compile_where_it_pays(self._engine, columns) if self._config.kernels.compile else ""

    def _columns(self, first: int, micro_batch: int) -> dict[Ref, Tensor]:
        assignment, size = self._assignment, self._config.micro_batch_size
        at = first + micro_batch * size
        found = self._data.batch(range(at, at + size), assignment.train.columns)
        return {
            Ref(assignment.placeholders[name]): to_device(
                self._engine.accelerator, column.to(getattr(torch, assignment.column_dtypes[name]))
            )
            for name, column in found.items()
        }


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
        if note := trainer.compile(site.engine):
            link.put(ReplicaNote(text=note[:MOST_NOTE]))
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
    if site.island is not None:
        raise refused("several ranks", "joined replicas", f"{site.ranks} ranks")
    torch.set_num_threads(order.assignment.threads)
    check_operators(order.assignment, site.engine)
    foreign = site.identity is not None
    data = stage_data(order.assignment, site.data_key, foreign=foreign, kinds=site.data_kinds)
    return GraphTrainer(order, kept, data["train"], open_accelerator(site.accelerator))
