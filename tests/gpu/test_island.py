"""An island of one rank on the device, over its own backend (NCCL): its collectives, parameters whole and in parts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import all_to_device, to_host
from isthmus.data import load_dataset
from isthmus.graph import Flow, Ref, assign, partition
from isthmus.graph.partition import align
from isthmus.job import prepare
from isthmus.runtime.device.island_ranks import begin_session, end_session
from isthmus.training.engine import Engine, TorchEngine
from isthmus.training.island import island_engine
from isthmus.training.optim import OptimizerConfig
from isthmus.training.ranks import StageSetUp
from isthmus.training.weights import initial_weights
from tests.runtime.jobs import DIGITS, job_of


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_one_rank_is_an_engine_of_the_cpu(gpu: Accelerator, tmp_path: Path, sharded: bool, precision: str) -> None:
    job = job_of("mlp", {}, DIGITS, precision=precision, clip_norm=1.0)
    job = msgspec.structs.replace(job, optimizer=(OptimizerConfig(name="adamw", lr=0.01, eps=1e-3),))
    captured, config = prepare(job).captured, job.engine()
    flow, eval_flow = Flow(captured.train), Flow(captured.eval)
    stage_of = assign(flow, [])
    (train,), (evaluation,) = partition(flow, stage_of), partition(eval_flow, align(flow, eval_flow, stage_of))
    weights = initial_weights(prepare(job).build, captured, 0)
    folder = tmp_path / "island"
    folder.mkdir(mode=0o700)
    ranks = begin_session(folder, 1, gpu)
    try:
        made = StageSetUp(train=train, evaluation=evaluation, config=config, sharded=sharded)
        engines: tuple[tuple[Engine, Accelerator], ...] = (
            (TorchEngine(train, evaluation, config, weights), HOST),
            (island_engine(made, weights, ranks), gpu),
        )
        data = load_dataset(job.used_data, "train")
        columns = {op.target: (op.name, op.outputs[0].dtype) for op in captured.train.ops if op.kind == "placeholder"}
        for step in range(3):
            for engine, accelerator in engines:
                for m in range(job.training.micro_batches):
                    batch = data.batch([step * 8 + m * 2, step * 8 + m * 2 + 1], list(columns))
                    typed = {c: t.to(getattr(torch, columns[c][1])) for c, t in batch.items()}
                    inputs = {Ref(columns[c][0]): t for c, t in all_to_device(accelerator, typed).items()}
                    engine.forward(step, m, inputs)
                    engine.backward(m, [])
                norms = engine.collect(None)
                if bool(norms.isfinite().all()):
                    engine.update(step, norms)
                else:
                    engine.skip_update()
        (expected, _), (island, _) = engines
        found, rounding = to_host(gpu, island.state()), {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}[precision]
        for name, value in expected.state().items():
            torch.testing.assert_close(found[name], value, rtol=rounding, atol=rounding / 10, msg=name)
    finally:
        end_session(ranks)
