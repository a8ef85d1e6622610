import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from isthmus.errors import UserError
from isthmus.models import GPT, GPTConfig, ModelSpec, UNet, UNetConfig, build_model
from isthmus.models.unet import Up

torch.set_num_threads(1)


def tokens(batch: int, length: int = 12, vocab: int = 31) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocab, (batch, length + 1))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def images(batch: int, side: int = 8) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(batch, 1, side, side), "labels": torch.randint(0, 10, (batch,))}


def pixels(batch: int) -> dict[str, torch.Tensor]:
    return images(batch) | {"labels": torch.randint(0, 10, (batch, 8, 8))}


GPT_SMALL: dict[str, object] = {
    "vocab_size": 31,
    "sequence_length": 12,
    "width": 16,
    "layers": 2,
    "heads": 2,
}
CASES = [
    ("gpt", GPT_SMALL, tokens),
    ("gpt", {**GPT_SMALL, "tie_embedding": True, "dropout": 0.1}, tokens),
    ("unet", {"width": 8}, images),
    ("unet", {"width": 4, "norm": "batch"}, images),
    ("unet", {"width": 4, "norm": "none", "depth": 3}, images),
    ("unet", {"width": 4, "task": "segmentation"}, pixels),
    ("mlp", {"width": 16}, images),
    ("mlp", {"layers": 0}, images),
    ("cnn", {"width": 4}, images),
    ("cnn", {"width": 4, "batch_norm": True}, images),
]
IDS = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options, _ in CASES]


@pytest.mark.parametrize(("name", "options", "example"), CASES, ids=IDS)
def test_loss_comes_first_and_reaches_every_parameter(name, options, example):
    torch.manual_seed(0)
    module = build_model(ModelSpec(name=name, options=options))
    outputs = module(**example(3))
    assert list(outputs) == ["loss", "logits"]
    assert outputs["loss"].dtype == torch.float32 and outputs["loss"].shape == ()
    outputs["loss"].backward()
    without = [name for name, value in module.named_parameters() if value.grad is None]
    assert without == []


@pytest.mark.parametrize(("name", "options", "example"), CASES, ids=IDS)
def test_fake_export_with_symbolic_batch_equals_eager(name, options, example):
    torch.manual_seed(0)
    eager = build_model(ModelSpec(name=name, options=options)).eval()
    batch = torch.export.Dim("b", min=2)
    inputs = example(3)
    with FakeTensorMode() as mode:
        module = build_model(ModelSpec(name=name, options=options)).eval()
        fakes = {key: mode.from_tensor(value) for key, value in inputs.items()}
        exported = torch.export.export(
            module, (), kwargs=fakes, dynamic_shapes={key: {0: batch} for key in fakes}, strict=False
        )
    graph = exported.graph_module
    values = eager.state_dict(keep_vars=True)
    others = example(5)  # a batch size that was not exported
    arguments = []
    for spec in exported.graph_signature.input_specs:
        arguments.append(others[spec.arg.name] if spec.target is None else values[spec.target])
    results = graph(*arguments)
    expected = eager(**others)
    assert [value.shape for value in results][-2:] == [expected["loss"].shape, expected["logits"].shape]
    assert torch.equal(results[-2], expected["loss"]) and torch.equal(results[-1], expected["logits"])


@pytest.mark.parametrize(("name", "options", "example"), CASES[:1] + CASES[2:3] + CASES[5:7] + CASES[8:])
def test_learns_one_batch(name, options, example):
    torch.manual_seed(0)
    module = build_model(ModelSpec(name=name, options=options))
    batch = example(8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    first = module(**batch)["loss"].item()
    for _ in range(60):
        optimizer.zero_grad()
        module(**batch)["loss"].backward()
        optimizer.step()
    assert module(**batch)["loss"].item() < 0.7 * first


def test_gpt_starts_near_the_uniform_guess():
    torch.manual_seed(0)
    module = GPT(GPTConfig(layers=2, width=64))
    loss = module(**tokens(4, 128, 256))["loss"].item()
    assert loss == pytest.approx(math.log(256), abs=0.1)


def test_gpt_sees_no_later_token():
    torch.manual_seed(0)
    module = GPT(GPTConfig(**GPT_SMALL))
    batch = tokens(2)
    before = module(**batch)["logits"]
    batch["input_ids"][:, 6] = (batch["input_ids"][:, 6] + 1) % 31
    after = module(**batch)["logits"]
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_gpt_loss_is_of_the_labels_as_given():
    torch.manual_seed(0)
    module = GPT(GPTConfig(**GPT_SMALL))
    batch = tokens(2)
    outputs = module(**batch)
    logarithms = outputs["logits"].log_softmax(-1).gather(-1, batch["labels"][..., None])
    assert outputs["loss"].item() == pytest.approx(-logarithms.mean().item(), rel=1e-5)


def test_gpt_residual_projections_start_smaller():
    torch.manual_seed(0)
    module = GPT(GPTConfig(width=128, layers=8))
    assert module.blocks[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert module.blocks[0].mlp.project.weight.std().item() == pytest.approx(0.005, rel=0.05)


def test_tied_embedding_is_one_parameter():
    free, tied = (GPT(GPTConfig(**GPT_SMALL, tie_embedding=tie)) for tie in (False, True))
    assert tied.head.weight is tied.token.weight
    assert free.head.weight is not free.token.weight


def test_gpt_dropout_acts_in_training_only():
    module = GPT(GPTConfig(**GPT_SMALL, dropout=0.5))
    batch = tokens(2)
    assert not torch.equal(module(**batch)["loss"], module(**batch)["loss"])
    module.eval()
    assert torch.equal(module(**batch)["loss"], module(**batch)["loss"])


def test_unet_uses_its_first_skip_in_two_places(monkeypatch):
    module = UNet(UNetConfig(width=4))
    seen: dict[str, torch.Tensor] = {}
    module.stem.register_forward_hook(lambda _module, _inputs, output: seen.update(stem=output))
    module.head.register_forward_hook(lambda _module, inputs, _output: seen.update(head=inputs[0]))
    skips: list[torch.Tensor] = []
    original = Up.forward

    def recording(self, hidden, skip):
        skips.append(skip)
        seen["last"] = original(self, hidden, skip)
        return seen["last"]

    monkeypatch.setattr(Up, "forward", recording)
    module(**images(2))
    assert len(skips) == 2 and skips[-1] is seen["stem"]
    assert torch.equal(seen["head"], seen["last"] + seen["stem"])


def test_unet_without_norm_has_none():
    kinds = {type(part).__name__ for part in UNet(UNetConfig(norm="none")).modules()}
    assert not kinds & {"GroupNorm", "BatchNorm2d"}
    assert "GroupNorm" in {type(part).__name__ for part in UNet(UNetConfig()).modules()}


@pytest.mark.parametrize(
    ("name", "options", "batch", "message"),
    [
        ("gpt", {"sequence_length": 8}, tokens(2, 9, 31), "got 9 tokens per sample, expected at most 8"),
        ("unet", {"depth": 4}, images(2), "multiples of 16, got an image of 8x8"),
        ("mlp", {"features": 10}, images(2), "'features': 10, got samples of 64 numbers"),
    ],
)
def test_a_batch_that_does_not_fit_names_the_option(name, options, batch, message):
    with pytest.raises(UserError, match=message):
        build_model(ModelSpec(name=name, options=options))(**batch)
