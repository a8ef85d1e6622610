"""A stage computes compiled what it did before; and it does so where that was measured to be quicker."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable

import pytest
import torch
from in_process import Pipeline, batches, capture_of, copies, random_cut, weights_of
from tests.tiers import represented_by
from torch import Tensor
from zoo import Dropouts, X, model

from isthmus.accelerators import HOST
from isthmus.errors import PeerError, StepError
from isthmus.graph import Ref
from isthmus.runtime.device.stage_preparation import unless_outdated
from isthmus.training import compiled as compiled_module
from isthmus.training.compiled import Backend, CompiledProgram, by_torch, compile_where_it_pays
from isthmus.training.engine import EngineConfig, TorchEngine

CONFIG = EngineConfig(micro_batches=2, micro_batch_size=2)
SOME = ("Frozen", "Quiet", "InPlace", "Written", "Lists", "Counted", "Dropouts")
"""Of the zoo: no gradients, in-place buffers, several outputs, counts, random operators."""


def pipelines(name: str, backend: Backend, *, recompute: bool = False) -> tuple[Pipeline, Pipeline]:
    """As it is, and compiled."""
    build, columns = model(name) if name != "Dropouts" else (Dropouts, X)
    captured = capture_of(build, columns)
    cut = random_cut(captured, random.Random(0), most=2)
    again = [recompute] * (len(cut) + 1)
    plain, compiled = (Pipeline(captured, cut, weights_of(build, captured), CONFIG, recompute=again) for _ in range(2))
    for engine in compiled.engines:
        engine.program = CompiledProgram(engine.eager, by_torch(backend))
    return plain, compiled


def assert_alike(name: str, backend: Backend, *, recompute: bool = False) -> None:
    plain, compiled = pipelines(name, backend, recompute=recompute)
    columns = X if name == "Dropouts" else model(name)[1]
    for step in range(2):
        data = batches(columns, CONFIG.micro_batches, CONFIG.micro_batch_size, step)
        (expected_loss, expected), (loss, found) = plain.step(step, copies(data)), compiled.step(step, copies(data))
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert (found[key] - value).norm() <= 1e-4 * value.norm() + 1e-6, key
    for key, value in plain.state().items():
        assert torch.allclose(compiled.state()[key], value, rtol=1e-4, atol=1e-5), key


@pytest.mark.parametrize("name", represented_by(SOME, "Written", "Dropouts"))
def test_a_compiled_stage_computes_what_it_did(name: str) -> None:
    assert_alike(name, "aot_eager", recompute=name == "Written")


def engine_of(name: str, *, dropout: bool = False) -> tuple[TorchEngine, dict[Ref, Tensor]]:
    """Of a whole model, with one micro-batch."""
    build, columns = (Dropouts, X) if dropout else model(name)
    captured = capture_of(build, columns)
    (engine,) = Pipeline(captured, [], weights_of(build, captured), CONFIG).engines
    (data,) = batches(columns, 1, CONFIG.micro_batch_size)
    names = {op.target: op.name for op in captured.train.ops if op.kind == "placeholder"}
    return engine, {Ref(names[key]): value for key, value in data.items()}


def test_what_is_quicker_is_kept_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch = engine_of("Written")
    before, random_state = {k: v.clone() for k, v in engine.state().items()}, HOST.random_state()
    times = iter([2.0, 1.0] * compiled_module.PASSES + [1.0, 2.0] * compiled_module.PASSES)

    def timed(engine: TorchEngine, act: Callable[[], object]) -> float:
        act()
        return next(times)

    monkeypatch.setattr(compiled_module, "_seconds", timed)
    worth_it = compile_where_it_pays(engine, batch, "eager")
    assert isinstance(engine.program, CompiledProgram)
    assert "1 s per micro-batch, 2 s without" in worth_it and worth_it.startswith("compiled in ")
    engine.program = engine.eager
    pays_not = compile_where_it_pays(engine, batch, "eager")
    assert engine.program is engine.eager
    assert pays_not == "not compiled: it would take 2 s per micro-batch, 1 s without"
    assert engine.state().keys() == before.keys()
    assert all(torch.equal(engine.state()[key], value) for key, value in before.items())
    assert torch.equal(HOST.random_state(), random_state)
    assert engine.take_loss() == (0.0, 0.0)


def broken(module: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
    raise RuntimeError("no compiler\nwas found")


def test_a_stage_that_cannot_be_compiled_computes_as_before() -> None:
    engine, batch = engine_of("Lists")
    for backend, why in ((broken, "no compiler was found"), ("no-such-backend", "no-such-backend")):
        found = compile_where_it_pays(engine, batch, backend)
        assert engine.program is engine.eager
        assert found.startswith("not compiled: ") and why in found and "\n" not in found


def test_an_operator_that_fails_is_named() -> None:
    """What compiled code raises says nothing of the job's model."""

    def fails(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., list[Tensor]]:
        def call(*inputs: Tensor) -> list[Tensor]:
            module(*inputs)
            raise RuntimeError("kernel.cpp:33, index out of bounds")

        return call

    engine, batch = engine_of("mlp")
    engine.program = CompiledProgram(engine.eager, by_torch(fails))
    with pytest.raises(RuntimeError, match=r"kernel\.cpp:33"):
        engine.forward(0, 0, batch)
    wrong = {ref: value if value.is_floating_point() else value + 10**6 for ref, value in batch.items()}
    with pytest.raises(StepError, match=r"cross_entropy_loss"):
        engine.forward(0, 0, wrong)


def test_random_operators_draw_what_they_drew() -> None:
    """Bit for bit: they are called between what is joined."""
    engine, batch = engine_of("", dropout=True)
    expected = engine.forward(3, 1, batch), engine.loss
    other, _ = engine_of("", dropout=True)
    other.program = CompiledProgram(other.eager, by_torch("eager"))
    assert (other.forward(3, 1, batch), other.loss) == expected


def test_a_stage_of_an_old_plan_is_not_waited_for() -> None:
    ends, asked = threading.Event(), iter([False, False, True])
    assert unless_outdated(lambda: "compiled", lambda: False) == "compiled"
    with pytest.raises(ZeroDivisionError):
        unless_outdated(lambda: str(1 // 0), lambda: False)
    with pytest.raises(PeerError, match="another plan"):
        unless_outdated(lambda: str(ends.wait()), lambda: next(asked))
    ends.set()


@pytest.mark.skipif(
    not os.environ.get("ISTHMUS_COMPILER") or shutil.which("g++") is None,
    reason="a C++ compiler at work for a minute (ISTHMUS_COMPILER=1)",
)
def test_with_the_compiler_itself() -> None:
    engine, batch = engine_of("mlp")
    found = compile_where_it_pays(engine, batch)
    assert found.startswith(("compiled in ", "not compiled: it would take ")), found
    assert_alike("mlp", "inductor")
