"""A stage on two ranks computes what it computes on one."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch
import torch.distributed as dist
from in_process import Pipeline, batches, capture_of, copies, weights_of
from tests.interpreters import script
from tests.tiers import represented_by
from torch import Tensor, nn
from torch.nn import functional
from zoo import X, model

from isthmus.accelerators import HOST
from isthmus.errors import RankLost, StepError, UserError
from isthmus.graph import Flow, Ref, assign, cuts, partition
from isthmus.graph.metrics import Metrics
from isthmus.graph.mixing import mixes
from isthmus.runtime.device.island_ranks import begin_session, end_session
from isthmus.training import ranks as ranks_module
from isthmus.training.checkpoint import OPTIMIZER
from isthmus.training.engine import Engine, EngineConfig, TorchEngine
from isthmus.training.island import IslandEngine, ShardedIsland
from isthmus.training.optim import OptimizerConfig
from isthmus.training.ranks import Command, Ranks, StageSetUp
from isthmus.training.sharded import ShardedEngine

CONFIG = EngineConfig(
    optimizers=(OptimizerConfig(name="sgd", lr=0.1, momentum=0.9),),  # Adam makes steps of gradients that are but noise
    micro_batches=2,
    micro_batch_size=4,
    clip_norm=1.0,
    steps=3,
)
STEPS = 3
Batches = Callable[[int], list[dict[Ref, Tensor]]]
OTHER_RANK = """
import sys
from pathlib import Path
from isthmus.runtime.device.island_ranks import Island, attend
attend(Island(folder=Path(sys.argv[1]), rank=1, count=2, local=2), print)
"""


class Watched(IslandEngine):
    """With what a pipeline in one process asks of its engines besides."""

    @property
    def train(self) -> object:
        return self._engine.train

    def gradients(self) -> dict[str, Tensor]:
        return self._engine.gradients()


class WatchedParts(Watched, ShardedIsland):
    def gradients(self) -> dict[str, Tensor]:
        return ShardedIsland.gradients(self)


class Guarded(nn.Module):
    """Its loss is infinite where a sample's first feature is 0, and its gradients are finite all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x[:, 0, 0]
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return functional.cross_entropy(x.mean(1), y) + torch.log(first.abs()).mean()


@pytest.fixture(scope="module")
def peer_connections(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where another rank waits for sessions."""
    folder = tmp_path_factory.mktemp("island")
    folder.chmod(0o700)
    other = subprocess.Popen([*script(OTHER_RANK, tmp_path_factory.mktemp("rank")), str(folder)])
    try:
        yield folder
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.fixture(scope="module")
def ranks(peer_connections: Path) -> Iterator[Ranks]:
    ranks = begin_session(peer_connections, 2)
    yield ranks
    if not ranks.broken:
        end_session(ranks)


def _trained(pipeline: Pipeline, data: list[list[dict[str, Tensor]]]) -> tuple[list[float], dict[str, Tensor]]:
    losses: list[float] = []
    for number, micro_batches in enumerate(data):
        loss, _ = pipeline.step(number, copies(micro_batches))
        pipeline.update(number)
        losses += [loss, pipeline.evaluate(copies(micro_batches)), *pipeline.metrics]
    return losses, pipeline.state()


@pytest.mark.parametrize("sharded", represented_by([False, True], True))
@pytest.mark.parametrize("name", represented_by(["gpt-tied", "unet", "Counted", "cnn"], "gpt-tied"))
def test_two_ranks_train_as_one(ranks: Ranks, name: str, sharded: bool) -> None:
    """Skips, tied parameters, a counted loss and batch norm; the island has the stage with the data, one in the middle,
    or the one with the loss."""
    build, columns = model(name)
    captured = capture_of(build, columns, metrics=Metrics(["accuracy"]).sums)
    legal = [c.position for c in cuts(Flow(captured.train))]
    boundaries = [legal[len(legal) // 3], legal[2 * len(legal) // 3]]
    data = [batches(columns, CONFIG.micro_batches, CONFIG.micro_batch_size, seed) for seed in range(STEPS)]
    alone = Pipeline(captured, boundaries, weights_of(build, captured), CONFIG)
    expected_losses, expected = _trained(alone, data)
    assert len(alone.metrics) == 2
    for stage in range(len(alone.stages)):
        shared = Pipeline(captured, boundaries, weights_of(build, captured), CONFIG)
        made = StageSetUp(
            train=shared.stages[stage], evaluation=shared.eval_stages[stage], config=CONFIG, sharded=sharded
        )
        engine = (WatchedParts if sharded else Watched)(made, weights_of(build, captured), ranks)
        shared.engines[stage] = cast(TorchEngine, engine)
        losses, state = _trained(shared, data)
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for key, value in expected.items():
            if key.startswith(OPTIMIZER):
                continue  # sums of gradients that nearly cancel
            error = (state[key] - value).double().norm()
            assert error <= 1e-6 * value.double().norm() + 1e-12, key


def _trained_with_skips(pipeline: Pipeline, data: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The second step is to be left out: the norm of every parameter says so, on whichever stage it is."""
    for number, micro_batches in enumerate(data):
        loss, _ = pipeline.step(number, copies(micro_batches))
        bad = number == 1
        assert math.isfinite(loss) != bad
        assert [bool(norm.isfinite()) for norm in pipeline.norms.values()] == [not bad] * len(pipeline.norms)
        if not bad:
            pipeline.update(number)
        for engine in pipeline.engines if bad else ():
            engine.skip_update()
    return pipeline.state()


def test_a_loss_that_is_infinite_on_one_rank_leaves_out_the_step_of_all(ranks: Ranks) -> None:
    captured = capture_of(Guarded, X)
    legal = [c.position for c in cuts(Flow(captured.train))]
    boundaries = [legal[len(legal) // 3], legal[2 * len(legal) // 3]]
    data = [batches(X, CONFIG.micro_batches, CONFIG.micro_batch_size, seed) for seed in range(STEPS)]
    data[1][0]["x"][CONFIG.micro_batch_size - 1, 0, 0] = 0.0  # of the other rank's share
    config = msgspec.structs.replace(CONFIG, non_finite="skip")
    weights = weights_of(Guarded, captured)
    alone = Pipeline(captured, boundaries, weights, config)
    expected = _trained_with_skips(alone, data)
    for stage in range(len(alone.stages)):
        shared = Pipeline(captured, boundaries, weights, config)
        made = StageSetUp(train=shared.stages[stage], evaluation=shared.eval_stages[stage], config=config)
        shared.engines[stage] = cast(TorchEngine, Watched(made, weights, ranks))
        state = _trained_with_skips(shared, data)
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6, msg=key)


class Mixing(nn.Module):
    """Samples are compared with their mean, in the first layer or in the second."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.late = late

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        mean = x.mean((0, 1))
        if not self.late:
            x = x - mean
        x = self.second(functional.gelu(x))
        return functional.cross_entropy((x - mean if self.late else x).mean(1), y)


@pytest.mark.parametrize("late", [False, True])
def test_samples_that_depend_on_each_other_are_not_shared_out(ranks: Ranks, late: bool) -> None:
    """Neither in one stage, nor where what is computed over them all goes to the next."""
    captured = capture_of(lambda: Mixing(late), X)
    weights = weights_of(lambda: Mixing(late), captured)
    targets = [op.target for op in Flow(captured.train).operators]
    boundaries = [targets.index("aten.mean.dim") + 1] if late else []
    pipeline = Pipeline(captured, boundaries, weights, CONFIG)
    made = StageSetUp(train=pipeline.stages[0], evaluation=pipeline.eval_stages[0], config=CONFIG)
    with pytest.raises(UserError, match=r"model: got aten\.mean\.dim \(Mixing, .* on a device of several ranks"):
        IslandEngine(made, weights, ranks)


def test_a_value_over_all_samples_of_an_earlier_stage_is_the_same_on_all_ranks(ranks: Ranks) -> None:
    captured = capture_of(lambda: Mixing(late=True), X)
    weights = weights_of(lambda: Mixing(late=True), captured)
    flow = Flow(captured.train)
    (boundary, *_) = [c.position for c in cuts(flow) if mixes(partition(flow, assign(flow, [c.position]))[1]) is None]
    data = [batches(X, CONFIG.micro_batches, CONFIG.micro_batch_size, seed) for seed in range(STEPS)]
    expected_losses, _ = _trained(Pipeline(captured, [boundary], weights, CONFIG), data)
    shared = Pipeline(captured, [boundary], weights, CONFIG)
    made = StageSetUp(train=shared.stages[1], evaluation=shared.eval_stages[1], config=CONFIG)
    shared.engines[1] = cast(TorchEngine, Watched(made, weights, ranks))
    losses, _ = _trained(shared, data)
    assert losses == pytest.approx(expected_losses, rel=1e-6)


def _uncut(name: str, config: EngineConfig = CONFIG) -> tuple[StageSetUp, dict[str, Tensor], Batches]:
    """The whole model as one stage, its weights, and a step's micro-batches."""
    build, columns = model(name)
    captured = capture_of(build, columns)
    weights = weights_of(build, captured)
    pipeline = Pipeline(captured, [], weights, config)
    made = StageSetUp(train=pipeline.stages[0], evaluation=pipeline.eval_stages[0], config=config, sharded=True)

    def inputs(step: int) -> list[dict[Ref, Tensor]]:
        found = batches(columns, config.micro_batches, config.micro_batch_size, step)
        return [{Ref(pipeline.placeholders[column]): value for column, value in batch.items()} for batch in found]

    return made, weights, inputs


def test_parameters_are_whole_only_while_they_are_needed(ranks: Ranks) -> None:
    made, weights, inputs = _uncut("gpt-tied")
    island = ShardedIsland(made, weights, ranks)
    engine = cast(ShardedEngine, island._engine)  # pyright: ignore[reportPrivateUsage]
    trained = {name: weights[name] for name in engine.owned}
    held = sum(p.numel() for p in engine._master.values())  # pyright: ignore[reportPrivateUsage]
    assert sum(w.numel() for w in trained.values()) <= 2 * held < sum(w.numel() + 2 for w in trained.values())
    island.forward(0, 0, inputs(0)[0])
    alive = engine._alive  # pyright: ignore[reportPrivateUsage]
    assert alive and all(kept.expired() for _, kept in alive.values()), "after the forward"
    island.backward(0, [])
    assert all(kept.expired() for _, kept in engine._alive.values()), "after the backward"  # pyright: ignore[reportPrivateUsage]


@pytest.mark.long
def test_parts_go_on_from_what_whole_parameters_were_saved_as(ranks: Ranks) -> None:
    """AdamW, whose state has two tensors and a count; replicas' sums, too, see whole gradients and put whole values."""
    config = msgspec.structs.replace(CONFIG, optimizers=(OptimizerConfig(name="adamw", lr=0.01, eps=1e-3),))
    made, weights, inputs = _uncut("gpt", config)
    alone = TorchEngine(made.train, made.evaluation, config, weights)
    island: Engine = ShardedIsland(made, weights, ranks)
    for step in range(3):
        for m, batch in enumerate(inputs(step)):
            for engine in (alone, island):
                engine.forward(step, m, batch)
                engine.backward(m, [])
        names = list(alone.trainable)
        totals = []
        for engine in (alone, island):
            sums = engine.take_gradients(names)
            engine.add_gradients({name: 2 * value for name, value in sums.items() if value is not None})
            norms = engine.collect(engine.count(step))
            totals.append(norms)
            engine.update(step, norms)
            assert engine.take_loss() is not None
        torch.testing.assert_close(totals[0], totals[1], rtol=1e-5, atol=1e-7)
        island.set_parameters(island.parameters(names))
        saved = island.state()
        assert saved.keys() == alone.state().keys()
        for name, value in alone.state().items():
            torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-6, msg=name)
        island = ShardedIsland(made, weights | saved, ranks)


class Remembering(nn.Module):
    """Keeps a statistic of its batches that is none of batch norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum((0, 1)))
        return functional.cross_entropy(self.head(x.mean(1)), y)


@pytest.mark.parametrize(
    ("build", "size", "words"),
    [(Guarded, 3, "multiple of 2"), (Remembering, 4, r"got aten\.(sum|add).* on a device of several ranks")],
)
def test_what_cannot_be_shared_out_is_refused(
    ranks: Ranks, build: Callable[[], nn.Module], size: int, words: str
) -> None:
    columns = X
    captured = capture_of(build, columns)
    pipeline = Pipeline(captured, [], weights_of(build, captured), CONFIG)
    config = EngineConfig(micro_batch_size=size)
    made = StageSetUp(train=pipeline.stages[0], evaluation=pipeline.eval_stages[0], config=config)
    with pytest.raises(UserError, match=words):
        IslandEngine(made, weights_of(build, captured), ranks)


def test_tensors_arrive_as_they_were_in_messages_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several types, empty, scalar, strided, and larger than a bucket."""
    sent: list[Tensor] = []
    monkeypatch.setattr(ranks_module.dist, "send", lambda tensor, to: sent.append(tensor.clone()))
    monkeypatch.setattr(ranks_module.dist, "recv", lambda tensor, source: tensor.copy_(sent.pop(0)))
    monkeypatch.setattr(ranks_module, "BUCKET_BYTES", 100)
    given = [
        {"flag": torch.tensor(True), "ids": torch.arange(6).view(2, 3).t(), "none": torch.empty(0, 3)},
        {"large": torch.randn(60), "half": torch.randn(5, dtype=torch.float64).bfloat16(), "x": torch.randn(3, 4)},
        {"complex": torch.randn(3, dtype=torch.complex64)},
    ]
    ranks = Ranks.__new__(Ranks)
    ranks.accelerator = HOST
    ranks.send(1, Command(kind="values", names=("a",)), given)
    assert len(sent) == 2 + 3, "two of a header, and the buckets"
    command, found = ranks.receive(1)
    assert command.names == ("a",) and not sent
    for group, expected in zip(found, given, strict=True):
        assert group.keys() == expected.keys()
        for name, value in expected.items():
            assert group[name].dtype == value.dtype and torch.equal(group[name], value), name


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (StepError("aten.add", "IndexError: too far"), StepError, r"^aten.add: IndexError: too far$"),
        (torch.OutOfMemoryError("tried to allocate 8 bytes"), torch.OutOfMemoryError, "^rank 1 .*tried to allocate 8"),
        (OSError("disk\nfull"), RankLost, "^rank 1 of this device: OSError: disk full$"),
    ],
)
def test_rank_0_has_the_error_of_the_rank_that_failed(error: Exception, kind: type[Exception], told: str) -> None:
    ranks, lost, later = Ranks.__new__(Ranks), RankLost("a rank of this device is gone"), ValueError("another's")
    ranks.rank, ranks._store = 1, dist.HashStore()  # pyright: ignore[reportPrivateUsage]
    assert ranks.cause(lost) is lost, "it ended without a word"
    for left in (error, later):
        ranks.leave(left)
    with pytest.raises(kind, match=told):
        raise ranks.cause(lost)
    assert ranks.broken


def test_a_rank_that_fails_in_mid_forward_ends_the_session_of_all(ranks: Ranks, peer_connections: Path) -> None:
    """The last of those with the session. Ranks of a sharded stage wait for each other in its forward: whoever waits
    must be told, by connections that are closed, and all must meet anew."""
    made, weights, inputs = _uncut("gpt")
    for failing in (CONFIG.micro_batch_size - 1, 0):  # a sample of the other rank, and of this one
        island, batch = ShardedIsland(made, weights, ranks), inputs(0)[0]
        ids, *_ = batch.values()
        ids[failing] = 10**6
        with pytest.raises(StepError, match=r"aten.embedding.*index out of range"):
            try:
                island.forward(0, 0, batch)
            except RankLost as lost:
                raise ranks.cause(lost) from lost
        end_session(ranks)
        ranks = begin_session(peer_connections, 2)
    ShardedIsland(made, weights, ranks).forward(0, 0, inputs(0)[0])
    end_session(ranks)
