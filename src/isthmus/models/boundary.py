"""Boundaries that are part of a model: its residual stream is so narrow where it is cut that little crosses a link.

The module is rewritten before it is captured, so that graph, plan, checkpoint and export all see the narrow stream.
Causal language models whose blocks add to a residual stream and read it through norms can be rewritten: our GPT, and
GPT-2, Llama and their like in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, cast

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from isthmus.errors import UserError

WRITERS = ("project", "c_proj", "o_proj", "out_proj", "down_proj", "fc_out", "fc2", "dense_4h_to_h")
"""Last names of the projections whose output a block adds to the stream."""
Rate = Annotated[float, Meta(ge=1)]


class BoundaryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a language model's residual stream crosses a cut."""

    method: Literal["subspace", "residual", "none"]
    """`subspace`: the stream lies in a fixed subspace, and any cut sends its coordinates. `residual`: bottlenecks at
    `after`, trained with the model. `none`: as it is."""
    rate: Rate = 50
    """The stream's width per number that crosses."""
    after: tuple[str, ...] | dict[str, Rate] = ()
    """Of `residual`: blocks behind which there is a bottleneck ("blocks.3"), or a table with a rate for each."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Of the subspace."""

    def __post_init__(self) -> None:
        if bool(self.after) != (self.method == "residual"):
            expected = "the blocks before each bottleneck" if self.method == "residual" else "none"
            raise ValueError(f"after: got {self.after!r} with method {self.method!r}, expected {expected}")

    @property
    def rates(self) -> Mapping[str, float]:
        """By block, of `residual`."""
        return self.after if isinstance(self.after, dict) else dict.fromkeys(self.after, self.rate)


class Stream(NamedTuple):
    """Where a language model reads and writes its residual stream."""

    token: str
    position: str | None
    readers: tuple[str, ...]
    """The norms of the blocks."""
    writers: tuple[str, ...]
    blocks: tuple[str, ...]
    norm: str
    """Behind the last block."""
    head: str
    """From the stream to the vocabulary."""
    width: int


def add_boundary(module: nn.Module, options: BoundaryOptions) -> nn.Module:
    """The module with its residual stream rewritten in place. Weights come from those that it has and, of bottlenecks,
    from torch's global generator. Works under `FakeTensorMode` too.

    Raises `UserError` for a module in which no residual stream is found, and for `after` that names no block.
    """
    if options.method == "none":
        return module
    stream = find_stream(module)
    if options.method == "subspace":
        _confine(module, stream, options)
        return module
    for name, rate in options.rates.items():
        if name not in stream.blocks:
            raise UserError(
                f"model.boundary.after: got {name!r}, expected blocks of {stream.blocks[0]} .. {stream.blocks[-1]}"
            )
        block = module.get_submodule(name)
        block.register_module("boundary", Bottleneck(stream.width, _narrow(stream.width, rate)))
        block.register_forward_hook(_through_bottleneck)
    return module


def find_stream(module: nn.Module) -> Stream:
    """Raises `UserError`, which points to codecs, for a module without one that can be rewritten."""
    lists = [(path, part) for path, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    tables = [(path, part) for path, part in module.named_modules() if isinstance(part, nn.Embedding)]
    if not lists or not tables:
        raise _no_stream(module, "no token embedding before a list of blocks")
    path, blocks = max(lists, key=lambda found: len(list(found[1].parameters())))
    width = tables[0][1].embedding_dim
    readers: list[str] = []
    writers: list[str] = []
    for index, block in enumerate(blocks):
        norms = [f"{path}.{index}.{name}" for name, part in block.named_children() if _is_norm(part, width)]
        ends = [f"{path}.{index}.{name}" for name, part in block.named_modules() if _writes(name, part, width)]
        if not norms or not ends or len(norms) > len(ends):
            raise _no_stream(module, f"{len(norms)} norms and {len(ends)} output projections in {path}.{index}")
        readers, writers = readers + norms, writers + ends
    parent = path.rpartition(".")[0]
    owner = module.get_submodule(parent)
    last = [f"{parent}.{name}".lstrip(".") for name, part in owner.named_children() if _is_norm(part, width)]
    if len(last) != 1 or len(tables) > 2 or any(part.embedding_dim != width for _, part in tables):
        raise _no_stream(module, f"{len(last)} norms beside {path} and {len(tables)} embeddings")
    shape = (tables[0][1].num_embeddings, width)
    outside = [(name, part) for name, part in module.named_modules() if not name.startswith(f"{path}.")]
    heads = [name for name, part in outside if isinstance(part, nn.Linear) and part.weight.shape == shape]
    if len(heads) != 1:
        raise _no_stream(module, f"{len(heads)} layers from {width} to the vocabulary")
    return Stream(
        token=tables[0][0],
        position=tables[1][0] if len(tables) == 2 else None,
        readers=tuple(readers),
        writers=tuple(writers),
        blocks=tuple(f"{path}.{index}" for index in range(len(blocks))),
        norm=last[0],
        head=heads[0],
        width=width,
    )


class Bottleneck(nn.Module):
    """z = x P + x E is what crosses, and x' = z P^T + z D goes on: P takes the first k numbers of a token, an identity
    of rank k, and E and D are learned (ResBM, arXiv 2604.11947, here with linear E and D and no bias)."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, narrow, bias=False)
        self.up = nn.Linear(narrow, width, bias=False)
        nn.init.normal_(self.down.weight, std=1 / math.sqrt(width))
        nn.init.normal_(self.up.weight, std=1 / math.sqrt(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        narrow = hidden[..., : self.down.out_features] + self.down(hidden)
        return nn.functional.pad(narrow, (0, self.up.out_features - self.up.in_features)) + self.up(narrow)


def _through_bottleneck(block: nn.Module, _given: object, found: object) -> object:
    bottleneck = cast("Bottleneck", block.boundary)
    if isinstance(found, tuple):  # of older transformers: the stream, and what else the block says
        return (bottleneck(found[0]), *found[1:])
    return bottleneck(found)


class Subspace(nn.Module):
    """What every stage knows without being sent it: the basis U, and the fixed part of token and position tables."""

    basis: Tensor
    token: Tensor
    position: Tensor | None

    def __init__(self, basis: Tensor, token: Tensor, position: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("basis", basis)
        self.register_buffer("token", token)
        self.register_buffer("position", position)
        self.step = _Step()

    def expanded(self, narrow: Tensor) -> Tensor:
        """[B, T, k] -> [B, T, width]: the whole stream."""
        sent = self.step.ids
        assert sent is not None, "the token embedding comes first"
        ids = sent.to(torch.int64)
        # A value of its own for each reader: a stage passes it to the next one only, not the first stage to all.
        self.step.ids = sent.clone()
        fixed = nn.functional.embedding(ids, self.token)
        if self.position is not None:
            fixed = fixed + self.position[: ids.shape[1]]
        return fixed + nn.functional.linear(narrow, self.basis)


class _Step:
    """The tokens of the forward that runs: no attribute of a module, which torch.export would not let change."""

    ids: Tensor | None = None


class NarrowTokens(nn.Module):
    """The learned part of the token embedding in coordinates of the subspace."""

    def __init__(self, weight: Tensor, subspace: Subspace) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._step = subspace.step
        self._sent_as = torch.int16 if len(weight) <= torch.iinfo(torch.int16).max else torch.int32

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, k]."""
        self._step.ids = ids.to(self._sent_as)
        return nn.functional.embedding(ids, self.weight)


class WideNorm(nn.Module):
    """A norm of the whole stream, from its coordinates."""

    def __init__(self, norm: nn.Module, subspace: Subspace) -> None:
        super().__init__()
        self.norm = norm
        self._subspace = (subspace,)  # no child: it has one place in the module

    def forward(self, narrow: Tensor) -> Tensor:
        """[B, T, k] -> [B, T, width]."""
        return self.norm(self._subspace[0].expanded(narrow))


class WideHead(nn.Module):
    """The last norm and the head, from the stream's coordinates."""

    def __init__(self, norm: nn.Module, head: nn.Module, subspace: Subspace) -> None:
        super().__init__()
        self.norm = norm
        self.head = head
        self._subspace = (subspace,)

    def forward(self, narrow: Tensor) -> Tensor:
        """[B, T, k] -> [B, T, vocabulary]."""
        found = self.head(self.norm(self._subspace[0].expanded(narrow)))
        self._subspace[0].step.ids = None
        return found


def _confine(module: nn.Module, stream: Stream, options: BoundaryOptions) -> None:
    """Subspace networks (arXiv 2506.01260): stream = positions + fixed token embedding + U c, and only c crosses.

    The tables keep their first values as their fixed part and learn a narrow part beside it, from zero. Projections
    into the stream become U^T W, so that no optimizer need keep them in the subspace. A head that was tied to the token
    table becomes a weight of its own.
    """
    narrow = _narrow(stream.width, options.rate)
    generator = torch.Generator().manual_seed(options.seed)
    basis = torch.linalg.qr(torch.randn(stream.width, narrow, generator=generator)).Q.contiguous()
    token, position = _table(module, stream.token), _table(module, stream.position)
    assert token is not None
    subspace = Subspace(basis.to(token.dtype), token, position)
    _untie(module, module.get_submodule(stream.token))
    module.register_module("boundary", subspace)
    module.set_submodule(stream.token, NarrowTokens(token.new_zeros(len(token), narrow), subspace))
    if stream.position is not None and position is not None:
        table = nn.Embedding(len(position), narrow, dtype=position.dtype)
        nn.init.zeros_(table.weight)
        module.set_submodule(stream.position, table)
    for name in stream.readers:
        module.set_submodule(name, WideNorm(module.get_submodule(name), subspace))
    # The head takes the last norm in: GPT-2 in transformers looks at the stream's width before that norm.
    head = WideHead(module.get_submodule(stream.norm), module.get_submodule(stream.head), subspace)
    module.set_submodule(stream.head, head)
    module.set_submodule(stream.norm, nn.Identity())
    for name in stream.writers:
        _narrow_writer(module.get_submodule(name), subspace)


def _narrow_writer(part: nn.Module, subspace: Subspace) -> None:
    weight, bias = cast("Tensor", part.weight), cast("Tensor | None", part.bias)
    basis = subspace.basis
    with torch.no_grad():
        if isinstance(part, nn.Linear):
            part.weight, part.out_features = nn.Parameter(basis.T @ weight), basis.shape[1]
        else:  # of GPT-2 in transformers: weights lie the other way, and it knows its output's size
            part.weight = nn.Parameter(weight @ basis)
            part.nf = basis.shape[1]  # pyright: ignore[reportArgumentType]
        if bias is not None:
            part.bias = nn.Parameter(bias @ basis)


def widened(module: nn.Module, plain: nn.Module) -> nn.Module:
    """`plain`, a model of the same family that was not rewritten, with the weights of one that `subspace` made: the
    same function up to rounding. A tied head is untied."""
    subspace, learned = cast("Subspace", module.boundary), dict(module.named_parameters())
    stream, basis = find_stream(plain), subspace.basis
    fixed = {stream.token: subspace.token, stream.position: subspace.position}
    _untie(plain, plain.get_submodule(stream.token))
    with torch.no_grad():
        for name, value in plain.named_parameters():
            owner, _, last = name.rpartition(".")
            if owner in stream.readers:
                found = learned[f"{owner}.norm.{last}"]
            elif owner == stream.norm:
                found = learned[f"{stream.head}.norm.{last}"]
            elif owner == stream.head:
                found = learned[f"{stream.head}.head.{last}"]
            elif owner in fixed:
                found = cast("Tensor", fixed[owner]) + learned[name] @ basis.T
            elif owner in stream.writers:  # Linear's weight and biases begin with the output; GPT-2's weights end so
                narrow = learned[name]
                found = basis @ narrow if narrow.shape[0] == basis.shape[1] else narrow @ basis.T
            else:
                found = learned[name]
            value.copy_(found)
    return plain


def has_subspace(module: nn.Module) -> bool:
    return isinstance(getattr(module, "boundary", None), Subspace)


def has_bottlenecks(module: nn.Module) -> bool:
    return any(isinstance(part, Bottleneck) for part in module.modules())


def _narrow(width: int, rate: float) -> int:
    return max(1, round(width / rate))


def _table(module: nn.Module, name: str | None) -> Tensor | None:
    return None if name is None else cast("Tensor", module.get_submodule(name).weight).detach().clone()


def _untie(module: nn.Module, table: nn.Module) -> None:
    """Every other layer that shares the table's weight gets a copy of it."""
    for part in module.modules():
        if part is not table and getattr(part, "weight", None) is table.weight:
            part.weight = nn.Parameter(cast("Tensor", table.weight).detach().clone())
    config: object = getattr(module, "config", None)
    if config is not None and hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = False  # pyright: ignore[reportAttributeAccessIssue]


def _is_norm(part: nn.Module, width: int) -> bool:
    weight = getattr(part, "weight", None)
    return "Norm" in type(part).__name__ and isinstance(weight, Tensor) and weight.shape == (width,)


def _writes(name: str, part: nn.Module, width: int) -> bool:
    wide = part.out_features if isinstance(part, nn.Linear) else getattr(part, "nf", None)
    return name.rpartition(".")[2] in WRITERS and wide == width


def _no_stream(module: nn.Module, what: str) -> UserError:
    return UserError(
        f"model.boundary: {type(module).__name__} has no residual stream that can be rewritten ({what}): expected a "
        "causal language model as gpt, hf-gpt2 or hf-llama; any model may use a codec: [compression] method = 'int4'"
    )
