"""The values that a run begins with: a pretrained model's where they lie in its files, all others in a temporary file.

The module is built in a copy of this process, which neither imports its library nor holds it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from isthmus.copies import begun_in_a_copy
from isthmus.job.prepared import Prepared
from isthmus.job.settings import Job
from isthmus.models import build_model
from isthmus.models.left_in_files import NotInFiles, Origins, left_in_files
from isthmus.protocol.draws import Draw
from isthmus.stores import is_url
from isthmus.training.checkpoint import variables_of
from isthmus.training.draws import LEAST_BYTES, DrawRecorder
from isthmus.training.file_backed import FileBacked, TensorSpace
from isthmus.training.layout import row_stride
from isthmus.training.stored import Sent, StoredTensor, stored_tensors
from isthmus.training.weights import initial_weights


class FirstWeights(NamedTuple):
    values: dict[str, Sent]
    note: str = ""  # for people: why a pretrained model was not left in its files
    space: TensorSpace | None = None  # must live as long as the values are read
    draws: tuple[Draw, ...] = ()  # of the module's build, in order, from the job's seed


class _Built(msgspec.Struct, frozen=True):
    values: dict[str, StoredTensor]
    draws: tuple[Draw, ...]
    note: str = ""


def first_weights(prepared: Prepared, folder: Path | None = None) -> FirstWeights:
    """Every variable of both graphs by the module's own name, as the module has it that is built under the job's seed.
    `folder`: where the temporary file is; None: in the system's folder for such. UserError where it does not fit."""
    return begin_first_weights(prepared, folder)()


def begin_first_weights(prepared: Prepared, folder: Path | None = None) -> Callable[[], FirstWeights]:
    """Return what gives the same: the module is built from now on, beside what this process does."""
    space = TensorSpace(folder or Path(tempfile.gettempdir()))
    built = begun_in_a_copy(partial(_built, prepared, space), _Built, f"building {prepared.job.model.name}")
    return lambda: _found(built(), space)


def _found(built: _Built, space: TensorSpace) -> FirstWeights:
    in_memory: dict[tuple[object, ...], Tensor] = {}
    found: dict[str, Sent] = {}
    for name, value in built.values.items():
        found[name] = value
        if value.header.stride != row_stride(value.header.shape):  # kernels see its strides, which no file has
            place = (value.offset, value.header.stride, value.header.shape)
            found[name] = in_memory[place] if place in in_memory else in_memory.setdefault(place, value.read())
    return FirstWeights(found, built.note, space, built.draws)


def _built(prepared: Prepared, space: TensorSpace) -> _Built:
    spec, note = prepared.job.model, ""
    if spec.is_pretrained:
        try:
            with left_in_files() as stand_ins:
                values, recorded = _initial(prepared, space)
                if not stand_ins:
                    raise NotInFiles("this version of transformers loads in another way")
                in_files = tensors_of(stand_ins, values)
                return _Built(_stored(values, space, in_files, recorded), tuple(recorded.draws))
        except Exception as e:  # of any kind: what is wrong with the model itself shows again when it is read
            if is_url(str(spec.options.get("path"))) and not isinstance(e, NotInFiles):
                raise  # not a reason to copy the whole model from its store
            note = f"the coordinator copies the pretrained model into a temporary file: {' '.join(str(e).split())}"
    values, recorded = _initial(prepared, space)
    return _Built(_stored(values, space, {}, recorded), tuple(recorded.draws), note)


def _initial(prepared: Prepared, space: TensorSpace) -> tuple[dict[str, Tensor], DrawRecorder]:
    with FileBacked(space) as mode:
        return initial_weights(prepared.build, prepared.captured, prepared.job.training.seed), mode.recorded


def _stored(
    values: Mapping[str, Tensor], space: TensorSpace, in_files: Mapping[str, StoredTensor], recorded: DrawRecorder
) -> dict[str, StoredTensor]:
    found = {name: in_files.get(name) or space.stored(name, value) for name, value in values.items()}
    origins = {n: recorded.origin(values[n]) for n in found.keys() - in_files.keys() if found[n].nbytes >= LEAST_BYTES}
    return found | {name: msgspec.structs.replace(found[name], drawn=origin) for name, origin in origins.items()}


def in_stores(job: Job) -> dict[str, StoredTensor]:
    """Where a model's values lie whose weights a URL names: digests of a checkpoint's base are of these. None of other
    models."""
    if not (job.model.base_is_kept and is_url(str(job.model.options.get("path")))):
        return {}
    with contextlib.suppress(NotInFiles), left_in_files() as stand_ins:
        torch.manual_seed(job.training.seed)
        return tensors_of(stand_ins, variables_of(build_model(job.model)))
    return {}


def tensors_of(stand_ins: Origins, values: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """The tensors of files in whose place values stand. NotInFiles where one was computed from them. Inside
    `left_in_files`."""
    origins = stand_ins.of(values)
    files = {path: stored_tensors(path, stand_ins.in_stores.get(path)) for path in {o.path for o in origins.values()}}
    found = {name: files[o.path][o.name].named(name).cast(o.dtype) for name, o in origins.items()}
    return {name: msgspec.structs.replace(t, copied=origins[name].copied) for name, t in found.items()}
