"""Subspace networks (arXiv 2506.01260): stream = positions + fixed token embedding + U c, and only c crosses a cut.

U is drawn from a seed and every stage has it, with the fixed tables: what crosses is lossless. Projections into the
stream become U^T W, so no special optimizer need keep them in the subspace. Tokens travel along in two or four bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from isthmus.models.residual_stream import ResidualStream, find_stream


class Subspace(nn.Module):
    """Tensors that every stage has without a message: the basis U, and the fixed part of token and position tables."""

    basis: Tensor
    token: Tensor
    position: Tensor | None

    def __init__(self, basis: Tensor, token: Tensor, position: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("basis", basis)
        self.register_buffer("token", token)
        self.register_buffer("position", position)
        self.step = _Step()

    def begin(self, _module: nn.Module, _given: object, columns: Mapping[str, object]) -> None:
        """Before each forward of the model: where its tokens stand, if that is given."""
        positions = columns.get("position_ids")
        self.step.positions = positions if isinstance(positions, Tensor) else None

    def expanded(self, narrow: Tensor) -> Tensor:
        """[B, T, k] -> [B, T, width]: the whole stream."""
        sent = self.step.ids
        assert sent is not None, "the token embedding comes first"
        ids = sent.to(torch.int64)
        # A value of its own for each reader: a stage passes it to the next one only, not the first stage to all.
        self.step.ids = sent.clone()
        fixed = nn.functional.embedding(ids, self.token)
        if self.position is not None:
            fixed = fixed + self._placed(self.position, ids.shape[1])
        return fixed + nn.functional.linear(narrow, self.basis)

    def _placed(self, table: Tensor, length: int) -> Tensor:
        if self.step.positions is None:
            return table[:length]
        positions, self.step.positions = self.step.positions, self.step.positions.clone()
        return nn.functional.embedding(positions, table)


class _Step:
    """The tokens of the forward that runs: no attribute of a module, which torch.export would not let change."""

    ids: Tensor | None = None
    positions: Tensor | None = None  # None: from 0 on


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


def confine(module: nn.Module, stream: ResidualStream, narrow: int, seed: int) -> None:
    """Rewrites the module in place; `narrow` is the length of c.

    The tables keep their first values as their fixed part and learn a narrow part beside it, from zero. A head that was
    tied to the token table becomes a weight of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(stream.width, narrow, generator=generator)).Q.contiguous()
    token, position = _table(module, stream.token), _table(module, stream.position)
    assert token is not None
    subspace = Subspace(basis.to(token.dtype), token, position)
    _untie(module, module.get_submodule(stream.token))
    module.register_module("boundary", subspace)
    module.register_forward_pre_hook(subspace.begin, with_kwargs=True)
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
            elif owner in stream.writers:
                first = last == "bias" or isinstance(plain.get_submodule(owner), nn.Linear)
                found = basis @ learned[name] if first else learned[name] @ basis.T
            else:
                found = learned[name]
            value.copy_(found)
    return plain


def has_subspace(module: nn.Module) -> bool:
    """Return whether `confine` rewrote the module."""
    return isinstance(getattr(module, "boundary", None), Subspace)


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
