"""The warning about `training.micro_batches` before the first round, where a loss may differ with the number of
micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from torch import nn

from isthmus.copies import asked
from isthmus.data import ColumnSpec
from isthmus.data.dataset import any_left_out, may_be_left_out
from isthmus.errors import UserError
from isthmus.extensions import import_object
from isthmus.federated.local import LocalConfig
from isthmus.federated.resident import pieces_of
from isthmus.graph.captured import Capture, Column
from isthmus.graph.label_means import is_even, own_mean
from isthmus.models import as_eager

FIELD = "training.micro_batches"


def own_mean_of(
    build: Callable[[], nn.Module], columns: Mapping[str, ColumnSpec], local: LocalConfig, *, forks: bool = True
) -> str:
    """Empty where nothing is to be said. The model is captured in a copy of this process where that `forks`."""
    count = pieces_of(local.batch_size, local.micro_batches)
    if count == 1:
        return ""
    try:
        question = partial(_is_even, build, columns, local.batch_size // count)
        even = asked(question, bool) if forks else question()
    except UserError as e:
        return (
            f"{FIELD}: got {local.micro_batches}, and whether the model's loss is the same with each number cannot be "
            f"read off its graph: {e}"
        )
    return "" if even else own_mean(count, FIELD)


def _is_even(build: Callable[[], nn.Module], columns: Mapping[str, ColumnSpec], size: int) -> bool:
    # Imported when it is needed: torch.export takes seconds.
    capture = cast("Capture", import_object("isthmus", "isthmus.graph.capture:capture"))
    wanted = {name: Column(c.dtype, c.shape, may_be_left_out(c)) for name, c in columns.items()}
    model = build()  # only now is its library imported
    with as_eager(wanted):
        found = capture(lambda: model, wanted, batch=size)
    return is_even(found.train, uneven=any_left_out(columns))
