"""LoRA from a job over three devices equals peft alone: transformers, `get_peft_model`, torch's AdamW, a plain loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus.api.export import ExportOptions, export_model
from isthmus.data import SampleOrder, load_dataset
from isthmus.data.dataset import batch_at
from isthmus.errors import UserError
from isthmus.experiments import Watcher
from isthmus.fleet import dump_fleet
from isthmus.job import Job, prepare
from isthmus.models import build_model
from isthmus.runtime.coordinator.parameter_store import ParameterStore
from isthmus.training.checkpoint import (
    CheckpointWriter,
    Manifest,
    checkpoint_weights,
    latest_checkpoint,
    load_checkpoint,
)
from isthmus.training.stored import Sent, in_memory
from tests.lazy import Lazy

from .jobs import fleet_of, job_of, random_cut, run
from .test_run_parity import CAUSAL, GPT2, LLAMA

transformers = Lazy("transformers")
peft = Lazy("peft")

STEPS, RATE, RANK, ALPHA = 3, 1e-2, 4, 16
ONE_CYCLE = {"max_lr": 0.02, "total_steps": STEPS}


def base(name: str) -> nn.Module:
    torch.manual_seed(7)
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | {"n_layer": 2}, use_cache=False))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 2}, use_cache=False))


def lora_job(folder: Path, name: str) -> Job:
    """Over three devices, with torch's OneCycleLR, which moves AdamW's first beta too."""
    base(name).save_pretrained(folder / "base")
    (folder / "fleet.toml").write_text(dump_fleet(fleet_of(3)))
    job = job_of("hf", {"path": str(folder / "base"), "task": "causal-lm"}, CAUSAL, steps=STEPS, save_every=1)
    rate = {"torch": "OneCycleLR", "options": ONE_CYCLE}
    optimizer = {"name": "adamw", "lr": RATE, "weight_decay": 0.01}
    tables = {**msgspec.to_builtins(job), "optimizer": [optimizer], "learning_rate": rate, "planner": "even"}
    tables["model"] |= {"lora": {"r": RANK, "lora_alpha": ALPHA}}
    return msgspec.convert({**tables, "fleet": str(folder / "fleet.toml")}, Job)


def micro_batches(job: Job, step: int) -> list[dict[str, Tensor]]:
    data, size = load_dataset(job.used_data, "train"), job.micro_batch_size
    order = SampleOrder(len(data), job.training.seed, job.training.shuffle)
    first = step * job.training.batch_size
    starts = range(first, first + job.training.batch_size, size)
    return [batch_at(data, order, start, size, list(data.columns)) for start in starts]


def peft_alone(job: Job, folder: Path) -> tuple[nn.Module, list[float]]:
    """Nothing of Isthmus but the batches."""
    torch.manual_seed(job.training.seed)
    pretrained = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", use_cache=False)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM")
    model = peft.get_peft_model(pretrained, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, **ONE_CYCLE)
    losses: list[float] = []
    for step in range(STEPS):
        total, batches = 0.0, micro_batches(job, step)
        for batch in batches:
            loss = model(**batch).loss
            (loss / len(batches)).backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 < STEPS:
            scheduler.step()
        losses.append(total / len(batches))
    return model, losses


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def adapter_of(folder: Path) -> dict[str, Tensor]:
    """What the newest checkpoint holds but optimizer state: nothing of the pretrained weights."""
    return {n: t.read() for n, t in checkpoint_weights(latest_checkpoint(folder / "checkpoints")).items()}


def assert_equal(got: Mapping[str, Sent], expected: Mapping[str, Sent]) -> None:
    assert got.keys() == expected.keys()
    assert all(torch.equal(in_memory(got[name]), in_memory(value)) for name, value in expected.items())


@pytest.mark.long
def test_gpt2_over_three_devices_equals_peft_alone(tmp_path: Path) -> None:
    """Its embeddings are tied over the cut, and its weights transposed."""
    job = lora_job(tmp_path, "gpt2")
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    prepared = prepare(job)
    plan, _ = run(prepared, random_cut(prepared, 3, seed=3), tmp_path / "run", watcher=watcher)
    theirs, expected = peft_alone(job, tmp_path)
    assert losses == expected
    assert_equal(adapter_of(tmp_path / "run"), trained(theirs))
    count = sum(value.numel() for value in trained(theirs).values())
    assert sum(stage.memory.gradients for stage in plan.stages) == 4 * count
    assert sum(stage.memory.optimizer for stage in plan.stages) == 8 * count, "AdamW keeps two numbers"


@pytest.mark.long
def test_llama_over_three_devices_and_exported_equals_peft_alone(tmp_path: Path) -> None:
    job, folder = lora_job(tmp_path, "llama"), tmp_path / "run"
    tuned = isthmus.train(job, run=folder)
    theirs, losses = peft_alone(job, tmp_path)
    assert len(tuned.plan.stages) == 3 and [point.loss for point in tuned.losses] == losses
    assert_equal(adapter_of(folder), trained(theirs))

    export_model(folder, tmp_path / "adapter")
    export_model(folder, tmp_path / "merged", ExportOptions(merge=True))
    loaded = peft.PeftModel.from_pretrained(base("llama"), tmp_path / "adapter").eval()
    (batch, *_) = micro_batches(job, 0)
    assert torch.equal(loaded(**batch).loss, theirs.eval()(**batch).loss)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(whole(**batch).loss, theirs.merge_and_unload()(**batch).loss)


def test_a_run_goes_on_from_a_checkpoint_and_the_pretrained_weights(tmp_path: Path) -> None:
    job = lora_job(tmp_path, "llama")
    prepared, names = prepare(job), frozenset(n for n, _ in build_model(job.model).named_parameters() if "lora_" in n)
    first = ParameterStore(prepared, names)
    first.begin()
    everything = {op.target for op in prepared.captured.train.ops if op.kind == "parameter"}
    given = {name: in_memory(value) + 1 for name, value in first.of(names, (), replica=0, without=()).items()}
    writer = CheckpointWriter(tmp_path / "checkpoints")
    writer.write(3, "stage-0", given)
    writer.write(3, "rest", first.rest)
    checkpoint = writer.commit(Manifest(step=3, seed=0, batch=8, base=first.base))
    second = ParameterStore(prepared, names)
    second.load(checkpoint)
    assert_equal(
        second.of(everything, (), replica=0, without=()),
        first.of(everything, (), replica=0, without=()) | given,
    )

    other = base("llama")
    with torch.no_grad():
        other.model.norm.weight[0] += 1e-6
    other.save_pretrained(tmp_path / "base")
    for load in (ParameterStore(prepared, names).load, lambda path: load_checkpoint(prepared.build(), path)):
        with pytest.raises(UserError, match="the pretrained weights are not those it was made with"):
            load(checkpoint)


@pytest.mark.long
def test_a_peft_model_of_the_callers_own(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=RANK, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base("llama"), config)
    ids = torch.randint(0, 256, (8, 16), generator=torch.Generator().manual_seed(0))
    given = {"model": model, "data": {"input_ids": ids, "labels": ids}, "optimizer": torch.optim.AdamW, "batch": 8}
    tuned = isthmus.train(**given, fleet=fleet_of(1), steps=1, run=tmp_path / "run")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert tuned.load(model) == 1
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if "lora_" in n}
    model.save_pretrained(tmp_path / "adapter")
    peft.PeftModel.from_pretrained(base("llama"), tmp_path / "adapter")
