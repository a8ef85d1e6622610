"""Where a causal language model reads and writes its residual stream: what a boundary in it rewrites."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from isthmus.errors import UserError

WRITERS = ("project", "c_proj", "o_proj", "out_proj", "down_proj", "fc_out", "fc2", "dense_4h_to_h")
"""Last names of the projections whose output a block adds to the stream."""


class ResidualStream(NamedTuple):
    """Where a language model reads and writes its residual stream."""

    token: str
    position: str | None
    readers: tuple[str, ...]  # the norms of the blocks
    writers: tuple[str, ...]
    blocks: tuple[str, ...]
    norm: str  # behind the last block
    head: str  # from the stream to the vocabulary
    width: int


def find_stream(module: nn.Module) -> ResidualStream:
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
    known = {tables[0][0], tables[-1][0], last[0], heads[0]}
    beside = [name for name, _ in module.named_parameters() if not name.startswith(f"{path}.")]
    if others := [name for name in beside if name.rpartition(".")[0] not in known]:
        raise _no_stream(module, f"{', '.join(others)} beside embeddings, blocks, last norm and head")
    return ResidualStream(
        token=tables[0][0],
        position=tables[1][0] if len(tables) == 2 else None,
        readers=tuple(readers),
        writers=tuple(writers),
        blocks=tuple(f"{path}.{index}" for index in range(len(blocks))),
        norm=last[0],
        head=heads[0],
        width=width,
    )


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
