"""A client that is a fleet: its local steps are those of a pipeline over the fleet's devices.

The pipeline computes what one process would, bit for bit: the same batches, cut into the same micro-batches, and the
same change of the weights. It computes whole descents. Gradients of single batches are never in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import msgspec
import torch
from torch import Tensor, nn

from isthmus.combinations import refused
from isthmus.data import DataSpec, load_dataset
from isthmus.data.dataset import Indices, SamplesOf, Split, batch_of_round, checked
from isthmus.documents import beside
from isthmus.errors import IsthmusError
from isthmus.federated.admission import first_state
from isthmus.federated.algorithms import Algorithm
from isthmus.federated.local import Batch, ConfiguredLocal, LocalConfig, RoundSteps, StepsByRound, Term
from isthmus.federated.resident import mean_loss, pieces_of
from isthmus.models import ModelSpec, build_model
from isthmus.plans import CompressionConfig
from isthmus.rng import orders


class PipelineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of this site that train its client together."""

    fleet: str  # A built-in fleet or a path to a fleet TOML: a process on this machine for each device.
    planner: str = "chain"  # Who plans the pipeline: one of `isthmus planners`.
    plan: str = ""  # A plan file to follow in place of planning, as `isthmus plan` writes it.
    compression: CompressionConfig | None = None
    """How messages between stages are packed; without this table they travel as they are."""
    device: str | dict[str, str] = "cpu"  # Where device processes compute: as `[runtime] device` of a job.
    emulate: bool = False  # Shape links and stretch compute to the fleet's figures.
    timeout: str = "60 s"  # Silence after which a device counts as lost.

    def counted_from(self, folder: str) -> PipelineConfig:
        """Return the spec as a file in this folder says it: with its paths."""
        plan = self.plan and beside(self.plan, folder)
        return msgspec.structs.replace(self, fleet=beside(self.fleet, folder), plan=plan)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive steps of a client's round whose batches are equally large: one run of the pipeline."""

    first: int  # number of its first sample among those of all epochs
    steps: int
    batch_size: int
    micro_batches: int
    is_last: bool = False  # whether it is the round's last step


def segments(samples: int, local: LocalConfig) -> tuple[Segment, ...]:
    """The steps of a client with so many samples. The last step is a segment by itself: what is asked of it is its
    gradient."""
    used, found = local.used(samples), list[Segment]()
    for epoch in range(local.epochs):
        for start in range(0, used, local.batch_size):
            size = min(local.batch_size, used - start)
            last = found[-1] if found else None
            if last is not None and last.batch_size == size:
                found[-1] = msgspec.structs.replace(last, steps=last.steps + 1)
            else:
                pieces = pieces_of(size, local.micro_batches)
                found.append(Segment(first=epoch * used + start, steps=1, batch_size=size, micro_batches=pieces))
    *before, last = found
    rest = last.steps - 1
    if rest:
        before.append(msgspec.structs.replace(last, steps=rest))
    return (*before, msgspec.structs.replace(last, first=last.first + rest * last.batch_size, steps=1, is_last=True))


class RoundData(SamplesOf):
    """A segment's samples of a client, in the order in which the client uses them: a data set for the devices."""

    def __init__(
        self, *, split: Split, data: DataSpec, window: tuple[int, int], key: tuple[int, int, int], local: LocalConfig
    ) -> None:
        """`window`: the first sample and their number. `key`: seed, round, client."""
        super().__init__(load_dataset(data, split))
        seed, round_, client = self._key = key
        order = orders(seed, round_, [client], len(self._dataset), local.epochs)[0]
        first, count = window
        self._rows = order[:, : local.used(len(self._dataset))].reshape(-1)[first : first + count]

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, Tensor]:
        seed, round_, _ = self._key
        return batch_of_round(self._dataset, self._rows[checked(indices, len(self))], columns, seed, round_)


def round_data(
    *, split: Split, data: dict[str, object], window: list[int], key: list[int], local: dict[str, object]
) -> RoundData:
    """`RoundData` from what JSON can hold."""
    first, count = window
    seed, round_, client = key
    return RoundData(
        split=split,
        data=msgspec.convert(data, DataSpec),
        window=(first, count),
        key=(seed, round_, client),
        local=msgspec.convert(local, LocalConfig),
    )


def round_spec(data: DataSpec, segment: Segment, key: tuple[int, int, int], local: LocalConfig) -> DataSpec:
    """The same as a job names it."""
    window = (segment.first, segment.steps * segment.batch_size)
    options = {"data": data, "window": window, "key": key, "local": local}
    return DataSpec(kind=f"{__name__}:round_data", options=msgspec.to_builtins(options))


class MeanLoss(nn.Module):
    """A model whose loss is the mean over a batch, as clients take it: a pipeline divides a sum later, and rounds
    otherwise."""

    def __init__(self, model: nn.Module, *, uneven: bool) -> None:
        """`uneven`: whether a loss may leave labels out."""
        super().__init__()
        self.model = model
        self._uneven = uneven

    def forward(self, **columns: Tensor) -> Tensor:
        # Of a mean that it knows by its tensor, a capture would make a sum and a count.
        return mean_loss(self.model, columns, uneven=self._uneven).clone()


def mean_loss_model(*, model: dict[str, object], uneven: bool) -> MeanLoss:
    return MeanLoss(build_model(msgspec.convert(model, ModelSpec)), uneven=uneven)


def mean_loss_spec(model: ModelSpec, *, uneven: bool) -> ModelSpec:
    """The same as a job names it."""
    options: dict[str, object] = {"model": msgspec.to_builtins(model), "uneven": uneven}
    return ModelSpec(name=f"{__name__}:{mean_loss_model.__name__}", options=options)


Descend = Callable[[Tensor, tuple[int, int, int]], Tensor]
"""(model [P], (seed, round, client)) -> the weights at the end of the client's steps less the model [P]."""


class PipelineLocal(ConfiguredLocal):
    """A client at work on a pipeline: the `LocalTrainer` that algorithms are given."""

    def __init__(
        self, descend: Descend, config: LocalConfig, steps: RoundSteps, samples: int, key: tuple[int, int, int]
    ) -> None:
        super().__init__(config, steps, samples)
        self._descend = descend
        self._key = key

    def start(self, model: Tensor) -> Tensor:
        return model.clone()

    def batches(self) -> Iterator[Batch]:
        _refuse()

    def gradient(self, weights: Tensor, batch: Batch) -> Tensor:
        _refuse()

    def full_gradient(self, weights: Tensor) -> Tensor:
        _refuse()

    def descend(self, model: Tensor, term: Term | None = None) -> Tensor:
        return self._descend(model, self._key) if term is None else _refuse()


def _refuse() -> NoReturn:
    raise refused("gradients of batches", "pipeline clients", "an algorithm that asks for them")


def check_descends(algorithm: Algorithm) -> None:
    """UserError for an algorithm whose clients need more than descents."""
    local = LocalConfig()
    steps = StepsByRound(local, 1).at(0)
    tried = PipelineLocal(lambda model, _: torch.zeros_like(model), local, steps, 1, (0, 0, 0))
    model = torch.zeros(1)
    server = algorithm.init_server(model)
    broadcast, state = algorithm.broadcast(server), first_state(algorithm, model)
    for one in algorithm.passes:
        try:
            one.client(tried, broadcast, state)
        except IsthmusError:
            raise
        except Exception:  # a second pass may need what the first one gave: the first client says so then
            return
