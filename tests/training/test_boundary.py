"""A rewritten residual stream: what crosses, the same bits under any cut, a plain model at the end, what is refused."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
from in_process import Pipeline, batches, capture_of, copies, module_of, random_cut, weights_of
from tests.tiers import represented_by
from tests.training.reference import reference_loss, reference_step
from torch import nn
from zoo import TEXT

from isthmus.errors import UserError
from isthmus.extensions import read_options
from isthmus.graph import Flow, cuts
from isthmus.graph.captured import Captured
from isthmus.models import (
    BoundaryOptions,
    ModelSpec,
    build_model,
    has_bottlenecks,
    has_subspace,
    is_hugging_face,
    save_hugging_face,
    widened,
)
from isthmus.models.boundary import add_boundary
from isthmus.training.engine import EngineConfig

CONFIG = EngineConfig(micro_batches=3, micro_batch_size=2)
WIDTH, RATE = 32, 16
FAMILIES: dict[str, tuple[dict[str, object], str]] = {
    "gpt": ({"vocab_size": 64, "sequence_length": 12, "width": WIDTH, "layers": 3, "heads": 2}, "blocks"),
    "hf-gpt2": ({"n_layer": 3, "n_embd": WIDTH, "n_head": 2, "vocab_size": 64, "n_positions": 12}, "transformer.h"),
    "hf-llama": (
        {
            "num_hidden_layers": 3,
            "hidden_size": WIDTH,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 64,
        },
        "model.layers",
    ),
}
"""Options of each, and where its blocks are."""
DROPOUT = {"hf-gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
EVERY = [(name, method) for name in FAMILIES for method in ("subspace", "residual")]


def spec_of(name: str, method: str) -> ModelSpec:
    pytest.importorskip("transformers") if name.startswith("hf-") else None
    options, blocks = FAMILIES[name]
    after = {f"{blocks}.0": 8.0, f"{blocks}.1": 16.0} if method == "residual" else ()
    boundary = read_options("boundary", {"method": method, "rate": RATE, "after": after}, BoundaryOptions)
    return ModelSpec(name=name, options={**options, **DROPOUT.get(name, {})}, boundary=boundary)


def build(name: str, method: str) -> nn.Module:
    return build_model(spec_of(name, method))


@functools.cache
def captured(name: str, method: str) -> Captured:
    return capture_of(functools.partial(build, name, method), TEXT)


@pytest.mark.parametrize(("name", "method"), represented_by(EVERY, ("gpt", "residual")))
def test_any_cut_equals_the_plain_module_bit_for_bit(name: str, method: str) -> None:
    graph, make = captured(name, method), functools.partial(build, name, method)
    for seed in range(3):
        data = batches(TEXT, CONFIG.micro_batches, CONFIG.micro_batch_size, seed)
        cut = random_cut(graph, random.Random(f"{name}{seed}"))
        pipeline, module = Pipeline(graph, cut, weights_of(make, graph), CONFIG), module_of(make)
        loss, gradients = pipeline.step(0, copies(data))
        expected_loss, expected = reference_step(module, copies(data), CONFIG)
        assert loss == expected_loss
        assert gradients.keys() == expected.keys()
        for key, value in expected.items():
            same = torch.equal if pipeline.sums_in_order else torch.allclose
            assert same(gradients[key], value), (key, cut)
        assert pipeline.evaluate(copies(data)) == reference_loss(module, copies(data))


@pytest.mark.parametrize(("name", "method"), represented_by(EVERY, ("gpt", "subspace"), ("hf-llama", "residual")))
def test_a_cut_behind_a_block_sends_the_narrow_stream(name: str, method: str) -> None:
    flow = Flow(captured(name, method).train)
    tokens = TEXT["input_ids"].shape[0]
    gradients = [cut.backward_bytes(flow, 1) for cut in cuts(flow) if cut.gradients]
    if method == "subspace":  # forward the tokens go along, in two bytes each
        least = [cut.forward_bytes(flow, 1) for cut in cuts(flow) if cut.gradients]
        assert min(gradients) == 4 * tokens * WIDTH // RATE and min(least) == min(gradients) + 2 * tokens
        assert gradients.count(min(gradients)) >= 2 * 3 - 1  # between any two branches of the three blocks
    else:
        assert {4 * tokens * WIDTH // 8, 4 * tokens * WIDTH // 16} <= set(gradients)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trained_subspace_is_a_plain_model_of_the_family(name: str, tmp_path: Path) -> None:
    spec = spec_of(name, "subspace")
    module = module_of(lambda: build_model(spec))
    data = batches(TEXT, 2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(2):
        reference_step(module, copies(data), CONFIG)
        optimizer.step()
    plain = widened(module, build_model(ModelSpec(name=name, options=spec.options)))
    assert not has_subspace(plain) and has_subspace(module) and not has_bottlenecks(module)
    expected = reference_loss(module, copies(data))
    assert reference_loss(plain, copies(data)) == pytest.approx(expected, rel=1e-5)
    if is_hugging_face(plain):
        save_hugging_face(plain, tmp_path / "out")
        again = type(plain).from_pretrained(tmp_path / "out")  # pyright: ignore
        assert reference_loss(again, copies(data)) == reference_loss(plain, copies(data))
    assert reference_loss(module_of(lambda: build_model(spec)), copies(data)) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt", "hf-gpt2"])
def test_a_subspace_knows_where_tokens_stand(name: str) -> None:
    spec = spec_of(name, "subspace")
    torch.manual_seed(0)
    module = build_model(spec).eval()
    plain = widened(module, build_model(ModelSpec(name=name, options=spec.options))).eval()
    columns = {"input_ids": torch.arange(5)[None], "position_ids": torch.arange(3, 8)[None]}
    with torch.no_grad():
        found, expected = module(**columns)["logits"], plain(**columns)["logits"]
        first = module(input_ids=columns["input_ids"])["logits"]
    assert torch.allclose(found, expected, atol=1e-5) and not torch.allclose(found, first, atol=1e-3)


def test_the_subspace_is_that_of_its_seed() -> None:
    def basis(seed: int) -> torch.Tensor:
        options = BoundaryOptions(method="subspace", rate=RATE, seed=seed)
        return add_boundary(build_model(ModelSpec(name="gpt", options=FAMILIES["gpt"][0])), options).state_dict()[
            "boundary.basis"
        ]

    assert torch.equal(basis(1), basis(1)) and not torch.equal(basis(1), basis(2))
    assert torch.allclose(basis(1).T @ basis(1), torch.eye(WIDTH // RATE), atol=1e-6)


def test_a_model_without_a_residual_stream_is_sent_to_the_codecs() -> None:
    options = BoundaryOptions(method="subspace")
    for spec in (ModelSpec(name="mlp"), ModelSpec(name="unet", options={"channels": 8})):
        with pytest.raises(UserError, match=r"no residual stream .* method = 'int4'"):
            add_boundary(build_model(spec), options)


def test_a_part_of_the_stream_that_is_not_known_is_named() -> None:
    module = build_model(ModelSpec(name="gpt", options=FAMILIES["gpt"][0]))
    module.register_parameter("learned_position", torch.nn.Parameter(torch.zeros(8, WIDTH)))
    with pytest.raises(UserError, match=r"no residual stream .*learned_position beside embeddings"):
        add_boundary(module, BoundaryOptions(method="subspace"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "residual"}, "after: got .* expected the blocks before each bottleneck"),
        ({"method": "subspace", "after": ["blocks.0"]}, "after: got .* expected none"),
        ({"method": "subspace", "rate": 0.5}, "rate"),
        ({"method": "ours"}, "method"),
    ],
)
def test_bad_settings_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_options("model.boundary", wrong, BoundaryOptions)


def test_a_block_that_is_not_there_is_named() -> None:
    options = BoundaryOptions(method="residual", after=("blocks.9",))
    with pytest.raises(UserError, match=r"after: got 'blocks.9', expected blocks of blocks.0 .. blocks.2"):
        add_boundary(build_model(ModelSpec(name="gpt", options=FAMILIES["gpt"][0])), options)
