"""The model of job.toml. Change it as you like: any nn.Module will do whose forward takes the data's columns as keyword
arguments and returns a loss. It is cut into stages by operator, so it needs no special layers."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.attention_norm(hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(attention.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class LanguageModel(nn.Module):
    def __init__(self, vocab_size: int, sequence_length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Parameter(0.02 * torch.randn(sequence_length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """All int64 [batch, tokens]. Labels are the next tokens: with them there is the mean loss in nats.
        `position_ids` say where tokens stand, if not from 0 on: `isthmus generate` gives one after the other."""
        if position_ids is None:
            hidden = self.token(input_ids) + self.position[: input_ids.shape[1]]
        else:
            hidden = self.token(input_ids) + F.embedding(position_ids, self.position)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def build(sequence_length: int = 64, width: int = 64, layers: int = 3, heads: int = 4) -> LanguageModel:
    """Options of [model] in job.toml are the arguments. Text is read as bytes: 256 different tokens."""
    return LanguageModel(256, sequence_length, width, layers, heads)
