"""Finished runs of small language models, made without training: what `served_run` reads of a run's folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from torch import nn

from isthmus.api.folder import RunFolder
from isthmus.cost import build_plan
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, cuts, encode
from isthmus.job import prepare
from isthmus.models import build_model
from isthmus.protocol.generation import Sampling
from isthmus.training.checkpoint import CheckpointWriter, Manifest
from tests.runtime.jobs import TEXT, job_of

GPT: dict[str, object] = {"layers": 2, "width": 32, "heads": 2, "sequence_length": 64}
GPT2: dict[str, object] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 256, "n_positions": 64}
LLAMA: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
DEVICES = 3
SPREAD = 20.0
"""Fresh weights are made so much larger: their logits would be alike."""


def fleet_of(count: int = DEVICES + 1, latency_s: float = 1e-3) -> Fleet:
    devices = tuple(Device(name=f"d{i}", region="here", flops_per_s=1e12, memory_bytes=1 << 34) for i in range(count))
    return Fleet(name="test", devices=devices, links=Links(default=Link(latency_s, 1e9)))


def finished_run(
    folder: Path,
    name: str = "gpt",
    options: dict[str, object] = GPT,
    *,
    fleet: Fleet | None = None,
    stages: int = 3,
    device: str | dict[str, str] = "cpu",
) -> tuple[Path, nn.Module]:
    """A run's folder, and the module that it would export. One device of the fleet has no stage."""
    fleet = fleet or fleet_of()
    plain = job_of(name, options, TEXT)
    job = msgspec.structs.replace(plain, runtime=msgspec.structs.replace(plain.runtime, emulate=True, device=device))
    prepared = prepare(job)
    legal = cuts(Flow(prepared.captured.train))
    boundaries = [legal[len(legal) * k // stages].position for k in range(1, stages)]
    plan = build_plan(prepared.problem(fleet), fleet.names[:stages], boundaries, planner="test")
    run = RunFolder(folder)
    run.begin(job, fleet, plan, 0)
    run.graph.write_bytes(encode(prepared.captured.train))
    torch.manual_seed(job.training.seed)
    module = build_model(job.model).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(SPREAD if parameter.ndim > 1 else 1.0)
    writer = CheckpointWriter(run.checkpoints)
    writer.write(2, "stage-0", dict(module.named_parameters()))
    t = job.training
    writer.commit(Manifest(step=2, seed=t.seed, batch=t.batch_size, shuffle=t.shuffle))
    return folder, module


def by_transformers(module: nn.Module, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    torch.manual_seed(sampling.seed)
    options = {} if not sampling.temperature else {"temperature": sampling.temperature, "top_p": sampling.top_p}
    found = module.generate(  # pyright: ignore[reportCallIssue]
        torch.tensor([prompt]),
        do_sample=bool(sampling.temperature),
        max_new_tokens=sampling.max_tokens,
        top_k=sampling.top_k or None,
        eos_token_id=None,
        use_cache=True,
        **options,
    )
    return tuple(found[0, len(prompt) :].tolist())
