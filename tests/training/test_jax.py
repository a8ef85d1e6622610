"""A stage that JAX computes gives what torch gives, alone and between stages that torch computes."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from in_process import Pipeline, batches, capture_of, copies, random_cut, weights_of
from torch import nn
from zoo import CASES, MODELS, Dropouts, X, model

from isthmus.data import ColumnSpec
from isthmus.errors import StepError, UserError
from isthmus.graph import Flow, Ref, cuts
from isthmus.training.engine import EngineConfig, TorchEngine
from isthmus.training.optim import OptimizerConfig

pytest.importorskip("jax", reason="the extra jax")
from tests.tiers import THOROUGH

from isthmus.training.jax.program import compute_by_jax, jax_program, without_entry

pytestmark = pytest.mark.thorough

CONFIG = EngineConfig(micro_batches=2, micro_batch_size=2)
CLOSE = 1e-5
RECURRENT = {"aten.lstm.input", "aten.gru.input"}


"""Compiling takes seconds for each model."""
SOME = ("gpt", "Written", "Dropouts")
STEPS = 100 if THOROUGH else 25


@pytest.fixture(autouse=True, scope="module")
def _compiled_plainly() -> Iterator[None]:
    """XLA optimizes for two fifths of the time: in `make test-long`, and for the devices of `test_engines.py`."""
    config = importlib.import_module("jax").config
    config.update("jax_disable_most_optimizations", not THOROUGH)
    yield
    config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("name", [*MODELS, *CASES, "Dropouts"] if THOROUGH else SOME)
def test_losses_gradients_and_buffers_are_torchs(name: str) -> None:
    """Random numbers too: dropout draws what it draws anywhere."""
    build, columns = model(name) if name != "Dropouts" else (Dropouts, X)
    captured = capture_of(build, columns)
    cut = random_cut(captured, random.Random(0), most=2)
    plain, other = (Pipeline(captured, cut, weights_of(build, captured), CONFIG) for _ in range(2))
    for engine in other.engines:
        engine.program, engine.evaluation_program = jax_program(engine.eager), jax_program(engine.eager_evaluation)
        assert set(without_entry(engine.eager)) <= RECURRENT
    for step in range(2):
        data = batches(columns, CONFIG.micro_batches, CONFIG.micro_batch_size, step)
        (expected_loss, expected), (loss, found) = plain.step(step, copies(data)), other.step(step, copies(data))
        assert loss == pytest.approx(expected_loss, rel=CLOSE)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert (found[key] - value).norm() <= CLOSE * value.norm() + CLOSE, key
    for key, value in plain.state().items():
        assert torch.allclose(other.state()[key], value, rtol=CLOSE, atol=CLOSE), key
    if THOROUGH or name == "gpt":
        data = batches(columns, 1, CONFIG.micro_batch_size, 2)
        assert other.evaluate(copies(data)) == pytest.approx(plain.evaluate(copies(data)), rel=CLOSE)


@pytest.mark.long
def test_a_gpt_over_stages_of_both_in_every_order() -> None:
    """All steps of training stay within 1e-4 of torch's."""
    config = EngineConfig(
        micro_batches=1, micro_batch_size=2, steps=STEPS, optimizers=(OptimizerConfig(name="sgd", lr=0.02),)
    )
    by_jax: list[tuple[bool, ...]] = [who for who in itertools.product((False, True), repeat=3) if any(who)]
    losses: dict[tuple[bool, ...], list[float]] = {}
    programs: dict[int, object] = {}
    build, columns = model("gpt")
    captured = capture_of(build, columns)
    legal = [cut.position for cut in cuts(Flow(captured.train))]
    thirds = [legal[len(legal) // 3], legal[2 * len(legal) // 3]]
    data = [batches(columns, 1, 2, step % 4) for step in range(STEPS)]
    for who in [(False, False, False), *by_jax]:
        pipeline = Pipeline(captured, thirds, weights_of(build, captured), config)
        for number, (engine, chosen) in enumerate(zip(pipeline.engines, who, strict=True)):
            if chosen:  # compiled once, for all orders
                engine.program = programs.setdefault(number, jax_program(engine.eager))  # pyright: ignore
        for step, batch in enumerate(data):
            losses.setdefault(who, []).append(pipeline.step(step, copies(batch))[0])
            pipeline.update(step)
    plain = losses.pop((False, False, False))
    assert plain[-1] < plain[0]
    for who, found in losses.items():
        assert found == pytest.approx(plain, abs=1e-4), who


def engine_of(name: str) -> tuple[TorchEngine, dict[Ref, torch.Tensor]]:
    """Of a whole model, with one micro-batch."""
    build, columns = model(name)
    captured = capture_of(build, columns)
    (engine,) = Pipeline(captured, [], weights_of(build, captured), CONFIG).engines
    (data,) = batches(columns, 1, CONFIG.micro_batch_size)
    names = {op.target: op.name for op in captured.train.ops if op.kind == "placeholder"}
    return engine, {Ref(names[key]): value for key, value in data.items()}


def test_what_is_said_of_it() -> None:
    engine, batch = engine_of("mlp")
    before = engine.program, engine.evaluation_program
    assert compute_by_jax(engine, batch).startswith("computed by JAX")
    assert engine.program is not before[0] and engine.evaluation_program is not before[1]


def test_an_index_out_of_range_is_an_error_that_names_its_operator() -> None:
    """Compiled code would take another row without a word."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(4, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.rows(x).sum()}

    columns = {"x": ColumnSpec(dtype="int64", shape=(2,), limit=4)}
    captured = capture_of(Rows, columns)
    pipeline = Pipeline(captured, [], weights_of(Rows, captured), EngineConfig(micro_batches=1, micro_batch_size=2))
    (engine,) = pipeline.engines
    engine.program = jax_program(engine.eager)
    pipeline.step(0, [{"x": torch.tensor([[0, 3], [1, 1]])}])
    with pytest.raises(StepError, match=r"aten\.embedding\.default .*index out of range"):
        pipeline.step(1, [{"x": torch.tensor([[0, 4], [1, 1]])}])


@pytest.mark.long
def test_operators_without_an_entry_are_refused() -> None:
    engine, batch = engine_of("Recurrent")
    with pytest.raises(UserError, match=r"JAX has no entry for aten\.gru\.input, aten\.lstm\.input"):
        compute_by_jax(engine, batch)
