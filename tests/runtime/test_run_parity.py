"""A run over several processes equals the plain loop: losses, parameters, buffers; and bytes equal the plan's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Link, Links
from isthmus.job import prepare
from tests.tiers import represented_by

from .jobs import DIGITS, RESNET, TEXT, final_weights, fleet_of, images, job_of, plain_run, random_cut, run

GPT = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 3, "heads": 2}


def pairs(folder: Path) -> DataSpec:
    path = folder / "pairs.jsonl"
    rows = [
        {"premise": f"the {i} dogs run " * (1 + i % 3), "hypothesis": f"{i} animals move", "label": i % 3}
        for i in range(40)
    ]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return DataSpec(kind="pairs", options={"path": str(path), "sequence_length": 24})


BERT = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 258,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

GPT2 = {
    "n_layer": 3,
    "n_head": 2,
    "n_embd": 16,
    "vocab_size": 256,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 16,
}
CAUSAL = DataSpec(kind="text", options={**TEXT.options, "shift_labels": False})

CASES: dict[str, tuple[str, dict[str, object], Callable[[Path], DataSpec], int, bool]] = {
    "gpt-5": ("gpt", GPT, lambda _: TEXT, 5, True),
    "gpt-tied-3": ("gpt", {**GPT, "tie_embedding": True}, lambda _: TEXT, 3, False),
    "hf-gpt2-2": ("hf-gpt2", GPT2, lambda _: CAUSAL, 2, False),
    "hf-llama-6": ("hf-llama", LLAMA, lambda _: CAUSAL, 6, True),
    "unet-3": ("unet", {"channels": 1, "classes": 10, "width": 8, "depth": 2}, lambda _: DIGITS, 3, False),
    "hf-bert-3": ("hf-bert-classifier", BERT, pairs, 3, False),
    "hf-resnet-3": ("hf-resnet", RESNET, images, 3, False),
}
"""Model, options, data, devices, and whether every sum has the order of eager autograd.

More models, cuts and settings run in one process: tests/training.
"""


@pytest.mark.parametrize("name", represented_by(CASES, "gpt-5"))
def test_processes_equal_the_plain_loop(name: str, tmp_path: Path) -> None:
    model, options, data, stages, bitwise = CASES[name]
    job = job_of(model, options, data(tmp_path), clip_norm=1.0)
    prepared = prepare(job)
    boundaries = random_cut(prepared, stages, seed=stages, once=bitwise)
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss) if item.kind == "train" else None)
    plan, outcome = run(prepared, boundaries, tmp_path, watcher=watcher)
    assert outcome.outcome == "done"

    module, expected = plain_run(job, prepared)
    saved = final_weights(tmp_path)
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    compared = [n for n in saved if not n.startswith("optimizer.")]
    assert {id(own[n]) for n in compared} >= {id(p) for p in module.parameters()}
    for weight in compared:
        if bitwise:
            assert torch.equal(saved[weight], own[weight]), weight
        else:
            error = (saved[weight].double() - own[weight].double()).norm()
            assert error <= 1e-6 * own[weight].double().norm().clamp(min=1e-6), weight
    assert losses == (expected if bitwise else pytest.approx(expected, rel=1e-6))

    (replica,) = plan.replicas
    for edge in replica.edges:
        source, target = plan.stages[edge.source].device, plan.stages[edge.target].device
        for step in range(job.training.steps):
            for a, b, what, size in (
                (source, target, "forward", edge.forward_bytes),
                (target, source, "backward", edge.backward_bytes),
            ):
                sent = [
                    s.size_bytes
                    for s in outcome.spans
                    if s.track == "send" and s.name == what and (s.device, s.other, s.step) == (a, b, step)
                ]
                assert sent == ([size] * job.training.micro_batches if size else []), (edge, what)


@pytest.mark.long
def test_every_send_is_on_record_without_an_exchange_at_the_end(tmp_path: Path) -> None:
    """The last gradients leave after the last item was computed; their link takes longer than all that is left."""
    job = job_of("gpt", GPT, TEXT, clip_norm=0.0)
    prepared = prepare(job)
    slow = Links(default=Link(1e-3, 1e5))
    fleet = msgspec.structs.replace(fleet_of(3), links=slow)
    plan = build_plan(prepared.problem(fleet), fleet.names, random_cut(prepared, 3, seed=1), planner="test")
    outcome = run_plan(prepared, plan, fleet, tmp_path, RunOptions(emulate=True), Watcher())
    for edge in plan.replica.edges:
        for name, count in (("forward", edge.forward_bytes), ("backward", edge.backward_bytes)):
            ends = (plan.stages[edge.source].device, plan.stages[edge.target].device)
            a, b = ends if name == "forward" else ends[::-1]
            sent = [s for s in outcome.spans if s.track == "send" and (s.name, s.device, s.other) == (name, a, b)]
            assert len(sent) == (job.training.steps * job.training.micro_batches if count else 0), (edge, name)
