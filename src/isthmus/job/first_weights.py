"""The values that a run begins with: a pretrained model's where they lie in its files, all others in memory."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from torch import Tensor

from isthmus.job.prepared import Prepared
from isthmus.models.left_in_files import NotInFiles, Origins, left_in_files
from isthmus.training.stored import Sent, StoredTensor, stored_tensors
from isthmus.training.weights import initial_weights


def first_weights(prepared: Prepared) -> tuple[dict[str, Sent], str]:
    """Every variable of both graphs by the module's own name, as the module has it that is built under the job's seed;
    and for people, why a pretrained model is in memory as a whole, if it is."""
    spec, note = prepared.job.model, ""
    if spec.is_pretrained:
        try:
            return _in_files(prepared), ""
        except Exception as e:  # of any kind: what is wrong with the model itself shows again when it is read
            note = f"the coordinator holds the whole pretrained model in memory: {' '.join(str(e).split())}"
    return {**initial_weights(prepared.build, prepared.captured, prepared.job.training.seed)}, note


def _in_files(prepared: Prepared) -> dict[str, Sent]:
    with left_in_files() as stand_ins:
        values: dict[str, Tensor] = initial_weights(prepared.build, prepared.captured, prepared.job.training.seed)
    if not stand_ins:
        raise NotInFiles("this version of transformers loads in another way")
    return {**values, **tensors_of(stand_ins, values)}


def tensors_of(stand_ins: Origins, values: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """The tensors of files in whose place values stand. NotInFiles where one was computed from them."""
    origins = stand_ins.of(values)
    files = {path: stored_tensors(path) for path in {origin.path for origin in origins.values()}}
    found = {name: files[o.path][o.name].named(name).cast(o.dtype) for name, o in origins.items()}
    return {name: msgspec.structs.replace(t, copied=origins[name].copied) for name, t in found.items()}
