"""LoRA from a job over three devices equals peft alone: transformers, `get_peft_model`, torch's AdamW, a plain loop."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from isthmus.data import SampleOrder, load_dataset
from isthmus.data.dataset import batch_at
from isthmus.experiments import Watcher
from isthmus.job import Job, prepare
from isthmus.models import LoraOptions

from .jobs import final_weights, job_of, random_cut, run
from .test_run_parity import CAUSAL, GPT2, LLAMA

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LORA = LoraOptions(r=4, lora_alpha=16)
RATE, STEPS = 1e-2, 3


def lora_job(model: str, options: dict[str, object], lora: LoraOptions = LORA, **training: object) -> Job:
    job = job_of(model, options, CAUSAL, steps=STEPS, **training)
    (optimizer,) = job.optimizer
    optimizer = msgspec.structs.replace(optimizer, name="adamw", lr=RATE, momentum=0.0, weight_decay=0.01)
    spec = msgspec.structs.replace(job.model, lora=lora)
    return msgspec.structs.replace(job, model=spec, optimizer=(optimizer,))


def micro_batches(job: Job, step: int) -> list[dict[str, Tensor]]:
    data, size = load_dataset(job.data, "train"), job.micro_batch_size
    order = SampleOrder(len(data), job.training.seed, job.training.shuffle)
    first = step * job.training.batch_size
    starts = range(first, first + job.training.batch_size, size)
    return [batch_at(data, order, start, size, list(data.columns)) for start in starts]


def peft_alone(job: Job, base: nn.Module, **lora: object) -> tuple[nn.Module, list[float]]:
    """Nothing of Isthmus but the batches. The base was built under the job's seed, just before."""
    config = peft.LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **lora)
    model = peft.get_peft_model(base, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.01)
    losses: list[float] = []
    for step in range(job.training.steps):
        total, batches = 0.0, micro_batches(job, step)
        for batch in batches:
            loss = model(**batch).loss
            (loss / len(batches)).backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / len(batches))
    return model, losses


def base_of(model: str, options: dict[str, object]) -> nn.Module:
    if model == "hf-gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))


@pytest.mark.parametrize(("model", "options"), [("hf-gpt2", GPT2), ("hf-llama", LLAMA)])
def test_three_devices_equal_peft_alone(model: str, options: dict[str, object], tmp_path: Path) -> None:
    job = lora_job(model, options)
    prepared = prepare(job)
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    plan, outcome = run(prepared, random_cut(prepared, 3, seed=3), tmp_path, watcher=watcher)
    assert outcome.outcome == "done"

    torch.manual_seed(job.training.seed)
    module, expected = peft_alone(job, base_of(model, options))
    saved = final_weights(tmp_path)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert {name.removeprefix("optimizer.").removesuffix(".exp_avg") for name in saved if "exp_avg" in name and not name.endswith("_sq")} == set(trained)
    same = [bool(torch.equal(saved[n], p)) for n, p in trained.items()]
    print(model, sum(same), len(same), losses, expected)
    for name, parameter in trained.items():
        assert torch.allclose(saved[name], parameter, rtol=1e-6, atol=1e-7), name
    assert losses == pytest.approx(expected, rel=1e-6)
    print([s.memory for s in plan.stages])
