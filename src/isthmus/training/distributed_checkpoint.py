"""A folder as `torch.distributed.checkpoint.save` writes it, from tensors that may lie in files: one is in memory at a
time. `distributed_tensors` reads such a folder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItem

from isthmus.errors import UserError
from isthmus.training.checkpoint import OPTIMIZER
from isthmus.training.stored import Sent, in_memory


class _Planner(dcp.DefaultSavePlanner):
    """Plans by tensors on the meta device, and reads each when it is written."""

    def __init__(self, values: Mapping[Tensor, Sent]) -> None:
        super().__init__()
        self._values = values

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = self._values.get(object) if isinstance(object, Tensor) else None
        return super().transform_object(write_item, object if found is None else in_memory(found))


def save_distributed(directory: Path, model: Mapping[str, Sent], state: Mapping[str, Sent]) -> None:
    """Write `{"model": model}`, and with `state`, which is named as in a checkpoint, `{"optim": {"state": {parameter:
    {key: tensor}}}}` beside it: what `dcp.load` fills a state dict of this form from. OSError, or UserError."""
    values: dict[Tensor, Sent] = {}

    def planned(tensor: Sent) -> Tensor:
        empty = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
        values[empty] = tensor
        return empty

    saved: dict[str, Any] = {"model": {name: planned(tensor) for name, tensor in model.items()}}
    for name, tensor in state.items():
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        saved.setdefault("optim", {"state": {}})["state"].setdefault(parameter, {})[key] = planned(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        try:
            dcp.save(saved, storage_writer=dcp.FileSystemWriter(directory), planner=_Planner(values), no_dist=True)
        except dcp.CheckpointException as e:  # no Exception
            reason = next(iter(e.failures.values()))[0]
            raise reason if isinstance(reason, OSError) else UserError(f"{directory}: {reason}") from None
