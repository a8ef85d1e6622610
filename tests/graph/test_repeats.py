"""Captures of models of which some blocks were exported for all, held against those of the whole models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from tests.tiers import THOROUGH, represented_by
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.graph import capture as capturing
from isthmus.graph import encode
from isthmus.graph.capture import Captured, Column, capture
from isthmus.models import ModelSpec, as_eager, build_model
from isthmus.models.lora import LoraOptions

TEXT = {"input_ids": Column("int64", (8,)), "labels": Column("int64", (8,))}
SMALL: dict[str, object] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
QWEN: dict[str, object] = {**SMALL, "num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 8}
LORA = LoraOptions(r=2, lora_dropout=0.1, target_modules="all-linear")
PICTURES = {"pixel_values": Column("float32", (3, 32, 32)), "labels": Column("int64", ())}
CLASSES = {"input_ids": Column("int64", (8,)), "labels": Column("int64", ())}
VECTOR = {"x": Column("float32", (4,)), "y": Column("float32", (4,))}


def exported(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module], columns: dict[str, Column], *, whole: bool
) -> tuple[Captured, list[int]]:
    """The capture, and how many blocks each export had whose graph was unrolled."""
    blocks: list[int] = []
    convert = capturing.convert

    def converted(*arguments: object, **options: object) -> object:
        found = convert(*arguments, **options)  # pyright: ignore
        repeats = options["repeats"]
        blocks.extend([] if repeats is None else [repeats.kept])  # pyright: ignore
        return found

    with monkeypatch.context() as patch:
        patch.setattr(capturing, "convert", converted)
        if whole:
            patch.setattr(capturing, "find_repeats", lambda *_: None)
        with ExitStack() as stack:

            def built() -> nn.Module:
                module = build()
                stack.enter_context(as_eager(columns))  # only now is the model's library imported
                return module

            return capture(built, columns), blocks


def check(monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module], columns: dict[str, Column]) -> list[int]:
    """As `exported`, held against the whole model's; where no block stands for others, `make test-long` does that."""
    found, blocks = exported(monkeypatch, build, columns, whole=False)
    if not (blocks or THOROUGH):
        return blocks  # each block was exported, as in the other capture
    expected, none = exported(monkeypatch, build, columns, whole=True)
    assert none == []
    assert encode(found.train) == encode(expected.train)
    assert encode(found.eval) == encode(expected.eval)
    assert found.constants.keys() == expected.constants.keys()
    assert all(torch.equal(value, expected.constants[name]) for name, value in found.constants.items())
    return blocks


GPT = ModelSpec(
    name="gpt", options={"vocab_size": 32, "sequence_length": 8, "width": 8, "layers": 7, "heads": 2, "dropout": 0.1}
)
MODELS = {
    "gpt": (GPT, TEXT, [3, 3]),
    "qwen3": (ModelSpec(name="hf:Qwen3ForCausalLM", options=QWEN), TEXT, [3, 3]),
    "qwen3, lora": (ModelSpec(name="hf:Qwen3ForCausalLM", options=QWEN, lora=LORA), TEXT, [3, 3]),
    "llama": (ModelSpec(name="hf-llama", options={**SMALL, "num_hidden_layers": 7}), TEXT, [3, 3]),
    "gpt2": (
        ModelSpec(name="hf-gpt2", options={"vocab_size": 64, "n_embd": 16, "n_layer": 7, "n_head": 2}),
        TEXT,
        [3, 3],
    ),
    "gpt2, scaled by block": (
        ModelSpec(
            name="hf-gpt2",
            options={
                "vocab_size": 64,
                "n_embd": 16,
                "n_layer": 7,
                "n_head": 2,
                "scale_attn_by_inverse_layer_idx": True,
            },
        ),
        TEXT,
        [],
    ),
    "bert": (ModelSpec(name="hf-bert-classifier", options={**SMALL, "num_hidden_layers": 7}), CLASSES, [3, 3]),
    "gemma 3": (
        ModelSpec(
            name="hf:Gemma3ForCausalLM",
            options={
                **QWEN,
                "num_hidden_layers": 14,
                "layer_types": ["sliding_attention", "full_attention"] * 7,
            },
        ),
        TEXT,
        [6, 6],
    ),
    "resnet": (
        ModelSpec(
            name="hf-resnet",
            options={
                "embedding_size": 8,
                "hidden_sizes": [8, 8, 8, 8],
                "depths": [2, 2, 2, 2],
                "num_labels": 4,
                "layer_type": "basic",
            },
        ),
        PICTURES,
        [],
    ),
}


@pytest.mark.parametrize("name", represented_by(MODELS, "gpt", "qwen3, lora"))
def test_the_graph_is_that_of_the_whole_model(monkeypatch: pytest.MonkeyPatch, name: str):
    spec, columns, blocks = MODELS[name]
    assert check(monkeypatch, lambda: build_model(spec), columns) == blocks


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) + first


class Scaled(Block):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + self.linear(x) / (self.number + 1)


class Dropping(Block):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + F.dropout(self.linear(x), 0.01 * self.number, self.training)


class OfTheBatch(Block):
    """One block takes a number for the size of the batch."""

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return self.linear(x) / (x.shape[0] if self.number != 5 else 4)


class Counting(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        self.calls += 1  # pyright: ignore
        return x + self.linear(x)


class WithoutGradient(Block):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.number != 5):
            added = self.linear(x)
        return x + added


class OtherLine(Block):
    """The same calls, of another line."""

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        if self.number == 5:
            return x + self.linear(x)
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self, block: type[Block], change: Callable[[Model], object] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(number) for number in range(8))
        self.early = self.late = self.returned = 0
        if change is not None:
            change(self)

    def forward(self, x: Tensor, y: Tensor) -> object:
        first, values = torch.relu(x), [x]
        for block in self.blocks:
            values.append(block(values[-1], first))
        if self.returned:
            return {"loss": F.mse_loss(values[-1], y), "value": values[self.returned]}
        out = values[-1] + (values[self.early] if self.early else 0) + (values[self.late] if self.late else 0)
        return F.mse_loss(out / len(self.blocks) if self.early else out, y)


def share_weight(model: Model) -> None:
    model.blocks[6].linear.weight = model.blocks[5].linear.weight  # pyright: ignore


def share_module(model: Model) -> None:
    model.blocks[6].linear = model.blocks[5].linear  # pyright: ignore


def freeze(model: Model) -> None:
    model.blocks[6].linear.requires_grad_(requires_grad=False)  # pyright: ignore


def swap(model: Model) -> None:
    model.blocks[5], model.blocks[6] = model.blocks[6], model.blocks[5]


def take_early(model: Model) -> None:
    model.early = 2


def take_late(model: Model) -> None:
    model.late = -2


def return_third(model: Model) -> None:
    model.returned = 3


def return_last(model: Model) -> None:
    model.returned = -1


OWN: dict[str, tuple[type[Block], Callable[[Model], object] | None, list[int]]] = {
    "alike": (Block, None, [3, 3]),
    "swapped, of which nothing differs": (Block, swap, [3, 3]),
    "reading their number": (Scaled, None, []),
    "with rates of their own": (Dropping, None, []),
    "one with a number for the batch": (OfTheBatch, None, []),
    "writing a buffer": (Counting, None, []),
    "one without gradients": (WithoutGradient, None, []),
    "of other lines": (OtherLine, None, []),
    "sharing a weight": (Block, share_weight, []),
    "sharing a module": (Block, share_module, []),
    "one frozen": (Block, freeze, []),
    "their number counts, and an early value": (Block, take_early, []),
    "returning a value of the third": (Block, return_third, []),
    "returning a value of the last": (Block, return_last, [3, 3]),
    "a value before the last": (Block, take_late, []),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OWN)
def test_blocks_are_exported_for_others_only_where_these_are_proven_alike(monkeypatch: pytest.MonkeyPatch, name: str):
    block, change, blocks = OWN[name]
    assert check(monkeypatch, lambda: Model(block, change), VECTOR) == blocks
