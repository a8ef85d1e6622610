"""Tokens of stages with key-value caches are those of Hugging Face's `generate`, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.api.folder import RunFolder
from isthmus.graph import Flow, Ref, assign, cuts, partition
from isthmus.graph.serving import POSITIONS
from isthmus.job.first_weights import Served, prepare_served, token_input
from isthmus.protocol.generation import Sampling
from isthmus.training.generation import ServedStage, TokenChooser

from .runs import GPT, LLAMA, by_transformers, finished_run

PROMPT: tuple[int, ...] = (5, 77, 200, 31, 8)
SAMPLINGS = {
    "greedy": Sampling(max_tokens=24),
    "sampled": Sampling(max_tokens=24, temperature=0.9, seed=3),
    "top-k": Sampling(max_tokens=24, temperature=1.3, top_k=9, seed=4),
    "top-p": Sampling(max_tokens=24, temperature=1.1, top_p=0.8, seed=5),
    "all": Sampling(max_tokens=24, temperature=1.5, top_k=40, top_p=0.9, seed=6),
}


def by_stages(served: Served, sampling: Sampling, stages: int, made: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The answer to the prompt, as a chain of stages gives it; `made` tokens are there already."""
    flow = Flow(served.graph)
    legal = cuts(flow)
    boundaries = [legal[len(legal) * k // stages].position for k in range(1, stages)]
    weights = {name: value for name, value in served.weights.items() if name != POSITIONS}
    chain = [ServedStage(graph, weights) for graph in partition(flow, assign(flow, boundaries))]
    text = [*PROMPT, *made]
    caches = [stage.cache(len(PROMPT) + sampling.max_tokens) for stage in chain]
    chooser, start, last = TokenChooser(sampling, len(made), served.vocabulary), 0, False
    while not last:
        given: dict[Ref, Tensor] = {Ref(token_input(flow)): torch.tensor([text[start:]])}
        count = len(text) - start
        for stage, cache in zip(chain, caches, strict=True):
            wanted = {c.value for c in stage.graph.receives} | {Ref(token_input(flow))}
            given |= stage.run(cache, start, {ref: t for ref, t in given.items() if ref in wanted}, count)
        start = len(text)
        token, last = chooser.choose(given[served.graph.loss])
        text.append(token)
    return tuple(text[len(PROMPT) :])


@pytest.mark.long
def test_stages_generate_as_transformers(tmp_path: Path) -> None:
    """Llama in one process; GPT-2 over processes in `test_served_run`."""
    folder, module = finished_run(tmp_path / "run", "hf-llama", LLAMA)
    run = RunFolder(folder)
    served = prepare_served(run.job(), run.checkpoints, 64)
    for what, sampling in SAMPLINGS.items():
        expected = by_transformers(module, PROMPT, sampling)
        assert len(set(expected)) > 5, "an answer that repeats one token would prove little"
        assert by_stages(served, sampling, 3) == expected, what
        assert by_stages(served, sampling, 2, expected[:11])[11:] == expected[11:], f"{what}, started again"


def test_our_model_generates_as_without_a_cache(tmp_path: Path) -> None:
    folder, module = finished_run(tmp_path / "run", "gpt", GPT)
    run = RunFolder(folder)
    served = prepare_served(run.job(), run.checkpoints, 64)
    for sampling in SAMPLINGS.values():
        text, chooser, last = list(PROMPT), TokenChooser(sampling, 0, served.vocabulary), False
        while not last:
            with torch.inference_mode():
                logits = module(torch.tensor([text]))["logits"][:, -1]
            token, last = chooser.choose(logits)
            text.append(token)
        assert by_stages(served, sampling, 3) == tuple(text[len(PROMPT) :])
