"""A small GPT: pre-LN decoder blocks, learned positions, fused query-key-value projection.

Architecture and initialisation follow GPT-2 (Radford et al. 2019, section 2.3).
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import nn
from torch.nn import functional as F

from isthmus.errors import UserError

Positive = Annotated[int, Meta(ge=1)]


class GPTConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a `GPT`."""

    vocab_size: Positive = 256  # Different tokens; 256 for bytes.
    sequence_length: Positive = 128  # Longest sequence, in tokens.
    width: Positive = 128  # Size of a token's hidden state; a multiple of `heads`.
    layers: Positive = 4  # Transformer blocks.
    heads: Positive = 4  # Attention heads of a block.
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # Probability, of embeddings, attention and residual branches.
    tie_embedding: bool = False  # Whether the output layer is the token embedding.


class SelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, width] -> [B, T, width]."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.residual_dropout(self.project(mixed.transpose(1, 2).flatten(2)))


class MLPBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.residual_dropout(self.project(F.gelu(self.expand(hidden))))


class TransformerBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = SelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLPBlock(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class GPT(nn.Module):
    """A decoder-only language model that returns its own loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise UserError(f"gpt option 'width': {config.width} is no multiple of heads={config.heads}")
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.sequence_length, config.width)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialise()
        if config.tie_embedding:
            self.head.weight = self.token.weight

    def _initialise(self) -> None:
        # Two residual branches per layer add up: their output projections shrink so the stream keeps its variance.
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=residual_std if name.endswith(".project") else 0.02)
                if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """The loss of predicting `labels`, which are the next tokens already: nothing is shifted here.

        `input_ids`, `labels`: int64 [B, T], T at most `sequence_length`; a label of -100 is ignored. `position_ids`:
        int64 [B, T], where the tokens stand; without them from 0 on.
        Returns `loss` (mean cross-entropy in nats, float32 scalar) where there are labels, and `logits`
        [B, T, vocab_size].
        """
        length = input_ids.shape[1]
        if length > self.config.sequence_length:
            raise UserError(f"gpt: got {length} tokens per sample, expected at most {self.config.sequence_length}")
        # A slice of the table, not a look-up by arange: no device is baked into the exported graph.
        hidden = self.token(input_ids)
        hidden = hidden + (self.position.weight[:length] if position_ids is None else self.position(position_ids))
        hidden = self.embedding_dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        if labels is None:
            return {"logits": logits}
        # float32: a mean over a large vocabulary loses digits in bfloat16.
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}
