"""Small modules, each with one thing that a cut could get wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.data import ColumnSpec
from isthmus.models import ModelSpec, build_model

X = {"x": ColumnSpec(dtype="float32", shape=(6, 8)), "y": ColumnSpec(dtype="int64", shape=(), limit=4)}
"""[B, 6, 8] features and a class of 4."""


class Zoo(nn.Module):
    """Three layers and a head; subclasses say what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.head = nn.Linear(48, 4)

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).flatten(1)), y)


class Frozen(Zoo):
    """Frozen layers at the start (no gradient flows into them) and in the middle (it flows through)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8).requires_grad_(False)
        self.second.requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x).tanh().sin()
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


class NoParameters(Zoo):
    """Long stretches without parameters, and without gradients before them."""

    def body(self, x: Tensor) -> Tensor:
        x = x.sin().cos().exp().tanh()
        x = self.first(x)
        return x.sin().cos().exp().tanh().sigmoid()


class UsedThrice(Zoo):
    """One parameter in three places, one layer under two names, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.first
        self.scale = nn.Parameter(torch.ones(8))

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x * self.scale).relu()
        x = self.second(x * self.scale).relu()
        return self.again(x) * self.scale


class Constants(Zoo):
    """Constants made in forward, a tensor attribute, a buffer outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.linspace(0, 1, 8), persistent=False)
        self.plain = torch.linspace(1, 2, 8)

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x) + torch.tensor([1.0, -1.0] * 4)
        x = self.second(x * self.hidden) * self.plain
        if self.training:
            return x + torch.tensor([0.5])
        return x - torch.tensor([0.25])


class Quiet(Zoo):
    """no_grad regions, detach, and enable_grad within no_grad."""

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            gate = self.second(x).sigmoid()
            with torch.enable_grad():
                inner = self.third(x).tanh()
        x = x * gate + inner + x.detach() * 0.5
        return self.second(x)


class InPlace(Zoo):
    """In-place operators on whole tensors, one on the input, one that keeps its type."""

    def body(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        x = self.first(x)
        x.add_(0.1).relu_()
        x = self.second(x)
        x.masked_fill_(x > 1, 0.3)
        h = self.third(x)
        h += x
        x = h
        count = torch.zeros(8, dtype=torch.int64)
        count += torch.arange(8)
        noise = torch.empty_like(x).fill_(2)
        noise.clamp_(max=1.5)
        return F.dropout(F.relu(x, inplace=True) * noise, 0.0, inplace=True) * count


class ViewWrites(Zoo):
    """Writes into views, after and before other views of the same tensor are taken."""

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x) + 0
        left, right = x[:, :, :4], x[..., 4:]
        x[:, 0] = 0
        left.mul_(2)
        right += left.detach()
        flat = x.view(-1, 48)
        x.transpose(1, 2)[:, 3] = 1.5
        flat[:, 5:9] *= 3
        x.diagonal(dim1=1, dim2=2).zero_()
        x.narrow(1, 2, 2).unsqueeze(0).sub_(0.1)
        x.permute(2, 0, 1)[0].tanh_()
        rows = torch.zeros_like(x)
        for i in range(3):
            rows[:, i] = self.second(x[:, i])
        table = torch.zeros(6, 8)
        top, bottom = table.split(3)
        top.add_(1)
        table.unbind(1)[2].fill_(3)
        bottom.t()[1:3].copy_(top[0, 0])
        return self.third(rows + flat.reshape(-1, 6, 8)) + table


class Copies(Zoo):
    """Writes into what may or may not be a view: reshape copies here, contiguous does not there."""

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        copied = x.transpose(1, 2).reshape(-1, 48)
        copied.add_(1)
        same = x.contiguous()
        same.mul_(2)
        kept = F.dropout(x, 0.5, training=False)
        kept.sub_(0.5)
        return self.second(x) + copied.view(-1, 6, 8)


class Lists(Zoo):
    """Operators with several outputs, of which some are not used."""

    def body(self, x: Tensor) -> Tensor:
        a, b, c, d = self.first(x).split(2, dim=-1)
        e, f = self.second(torch.cat([b, a, d, c], -1)).chunk(2, dim=-1)
        rows = torch.cat([e, f], -1).unbind(1)
        top, index = torch.stack(rows[::-1], 1).topk(3, dim=-1)
        spread, mean = torch.std_mean(top, dim=-1, keepdim=True)
        lowest = top.min(dim=-1, keepdim=True)
        return self.third(torch.stack(rows, 1)) * mean + spread + index.sum(-1, keepdim=True) + lowest.values


class Layouts(Zoo):
    """Integer, boolean, expanded and transposed tensors that later parts use."""

    def body(self, x: Tensor) -> Tensor:
        order = x.argsort(dim=1)
        mask = x > 0
        mean = self.first(x).mean(1, keepdim=True).expand(-1, 6, -1)
        turned = self.second(x).transpose(1, 2)
        strided = turned[:, ::2]
        x = self.third(x + mean).relu()
        x = torch.where(mask, x, mean).gather(1, order)
        return x @ turned.softmax(-1) @ x + strided.sum(1, keepdim=True).transpose(1, 2)


class Written(Zoo):
    """Buffers that forward writes: whole, through a view, under no_grad, read by autograd before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("queue", torch.zeros(6, 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(6)

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.average.clone()
        x = self.norm(x)
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
                self.queue[:3] = self.queue[3:].clone()
                self.queue[3:] = x[0, :3]
        return self.second(x) + self.queue


class TwoFaced(Zoo):
    """Train and eval run different operators in a different number."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(48, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        extra = torch.zeros(())
        if self.training:
            x = x + x.sin() * 0.1
            extra = F.cross_entropy(self.auxiliary(x.flatten(1)), y)
        else:
            x = x.exp().log().sin().asin() if x.shape[1] == 7 else x.clamp(-3, 3).abs()
        x = self.third(self.second(x).relu())
        logits = self.head(x.flatten(1))
        return {"loss": F.cross_entropy(logits, y) + 0.3 * extra, "logits": logits}


class Recurrent(Zoo):
    """An LSTM and a GRU: one operator with many parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, num_layers=2, batch_first=True, bidirectional=True)

    def body(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.first(x))
        x, _ = self.gru(x)
        return self.second(x[..., :8])


class Encoder(Zoo):
    """The transformer layers that come with torch, whose eval mode has a fused path."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def body(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Counted(Zoo):
    """(loss_sum, count): samples of class 0 do not count."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.second(self.first(x).relu()).flatten(1)
        loss = F.cross_entropy(self.head(hidden), y, ignore_index=0, reduction="sum")
        return {"loss": loss, "count": (y != 0).sum()}


class Dropouts(Zoo):
    """Dropout of several kinds, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.feature = nn.Dropout1d(0.5)

    def body(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.3, self.training).relu()
        x = self.feature(self.second(x)) + 0.1 * torch.randn_like(x)
        return F.rrelu(self.third(x), training=self.training)


CASES: dict[str, Callable[[], nn.Module]] = {
    case.__name__: case
    for case in (
        Frozen,
        NoParameters,
        UsedThrice,
        Constants,
        Quiet,
        InPlace,
        ViewWrites,
        Copies,
        Lists,
        Layouts,
        Written,
        TwoFaced,
        Recurrent,
        Encoder,
        Counted,
    )
}


def _tokens(limit: int, length: int = 12) -> ColumnSpec:
    return ColumnSpec(dtype="int64", shape=(length,), limit=limit)


TEXT = {"input_ids": _tokens(64), "labels": _tokens(64)}
SENTENCE = {
    "input_ids": _tokens(64),
    "attention_mask": _tokens(2),
    "token_type_ids": _tokens(2),
    "labels": ColumnSpec(dtype="int64", limit=3),
}
DIGITS = {"pixel_values": ColumnSpec(dtype="float32", shape=(1, 8, 8)), "labels": ColumnSpec(dtype="int64", limit=10)}
PHOTOS = {"pixel_values": ColumnSpec(dtype="float32", shape=(3, 32, 32)), "labels": ColumnSpec(dtype="int64", limit=4)}
_GPT: dict[str, object] = {"vocab_size": 64, "sequence_length": 12, "width": 16, "layers": 2, "heads": 2}
_BERT: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

MODELS: dict[str, tuple[ModelSpec, dict[str, ColumnSpec]]] = {
    "gpt": (ModelSpec(name="gpt", options=_GPT), TEXT),
    "gpt-tied": (ModelSpec(name="gpt", options={**_GPT, "tie_embedding": True}), TEXT),
    "unet": (ModelSpec(name="unet", options={"width": 4, "depth": 2}), DIGITS),
    "unet-batch-norm": (ModelSpec(name="unet", options={"width": 4, "depth": 1, "norm": "batch"}), DIGITS),
    "cnn": (ModelSpec(name="cnn", options={"width": 4, "batch_norm": True}), DIGITS),
    "mlp": (ModelSpec(name="mlp", options={"width": 16}), DIGITS),
    "hf-gpt2": (
        ModelSpec(
            name="hf-gpt2",
            options={
                "n_layer": 2,
                "n_head": 2,
                "n_embd": 16,
                "vocab_size": 64,
                "n_positions": 16,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        ),
        TEXT,
    ),
    "hf-llama": (
        ModelSpec(
            name="hf-llama",
            options={
                "num_hidden_layers": 2,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 64,
            },
        ),
        TEXT,
    ),
    "hf-bert": (ModelSpec(name="hf-bert-classifier", options=_BERT), SENTENCE),
    "hf-resnet": (
        ModelSpec(
            name="hf-resnet",
            options={
                "embedding_size": 4,
                "hidden_sizes": [4, 8],
                "depths": [1, 1],
                "layer_type": "basic",
                "num_labels": 4,
            },
        ),
        PHOTOS,
    ),
}


def model(name: str) -> tuple[Callable[[], nn.Module], dict[str, ColumnSpec]]:
    """Builder and columns of one of `MODELS`, or of the zoo."""
    if name in CASES:
        return CASES[name], X
    spec, columns = MODELS[name]
    return functools.partial(build_model, spec), columns
