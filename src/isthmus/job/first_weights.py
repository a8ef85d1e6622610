"""The values that a run begins with: a pretrained model's where they lie in its files, all others in a temporary file.

The module is built in a copy of this process, which neither imports its library nor holds it.

A run's model, ready to generate, has its serving graph, its trained weights, and a proof that caches change nothing.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import torch
from torch import Tensor, nn

from isthmus.copies import begun_in_a_copy
from isthmus.errors import UserError
from isthmus.extensions import import_object
from isthmus.graph import Flow, OpGraph, Ref, partition
from isthmus.graph.captured import Captured, ServingCapture
from isthmus.graph.serving import CANNOT, POSITIONS, TOKENS
from isthmus.job.prepared import Prepared
from isthmus.job.settings import Job
from isthmus.models import as_eager, build_model
from isthmus.models.left_in_files import NotInFiles, Origins, left_in_files
from isthmus.protocol.draws import Draw
from isthmus.stores import is_url
from isthmus.training.checkpoint import latest_checkpoint, load_checkpoint, variables_of
from isthmus.training.draws import LEAST_BYTES, DrawRecorder
from isthmus.training.file_backed import FileBacked, TensorSpace
from isthmus.training.generation import ServedStage
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


PROBE = (1, 2, 3, 1)  # tokens that every model has, for the proof
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.05}
"""Relative to the largest logit: kernels for one token and for several round differently."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Weights lie in memory here, as a coordinator has those of a run."""

    graph: OpGraph  # its `loss` are the logits of the next token, [1, vocabulary]
    weights: dict[str, Tensor]
    context: int  # tokens of a prompt and its answer together, at most
    ends: tuple[int, ...] = ()  # tokens with which the model ends a text
    step: int  # optimizer steps behind the weights

    @property
    def vocabulary(self) -> int:
        return self.graph.op(self.graph.loss.op).outputs[self.graph.loss.index].shape_at(1)[-1]


def prepare_served(job: Job, checkpoints: Path, trained: int) -> Served:
    """The newest checkpoint; `trained` tokens were in training's sequences. UserError where there is none, or the model
    does not generate token by token."""
    checkpoint = latest_checkpoint(checkpoints)
    # Imported when it is needed: torch.export takes seconds.
    capture = cast("ServingCapture", import_object("isthmus", "isthmus.graph.serving_capture:capture_serving"))
    with contextlib.ExitStack() as stack:

        def build() -> nn.Module:
            module = build_model(job.model)
            stack.enter_context(as_eager(()))  # only now is the module's library imported
            return module

        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        graph, constants, context = capture(build, name=job.model.name, dtype=job.training.dtype, trained=trained)
        torch.manual_seed(job.training.seed)  # what a checkpoint leaves out may have been drawn
        module = build()
        step = load_checkpoint(module, checkpoint, in_files=in_stores(job))
        module = module.to(job.training.dtype).eval()
    captured = Captured(train=graph, eval=graph, constants=constants | {POSITIONS: torch.empty(0)})
    weights = initial_weights(lambda: module, captured, job.training.seed)
    found = Served(graph=graph, weights=weights, context=context, ends=ends_of(module), step=step)
    check_decoding(found, module, TOLERANCE[job.training.precision])
    return found


def ends_of(module: nn.Module) -> tuple[int, ...]:
    """Return the ends as transformers' configs say them; ours have none."""
    found: object = getattr(getattr(module, "config", None), "eos_token_id", None)
    return (found,) if isinstance(found, int) else tuple(cast("Sequence[int]", found or ()))


def check_decoding(served: Served, module: nn.Module, tolerance: float) -> None:
    """UserError unless the logits are the module's own, whether tokens come at once or one by one."""
    tokens = [token % served.vocabulary for token in PROBE]
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor([tokens]))["logits"][:, -1].float()
    at_once, one_by_one = (_logits(served, tokens, first) for first in (len(tokens), 2))
    limit = tolerance * float(expected.abs().max())
    for what, found in (("with given positions", at_once), ("token by token", one_by_one)):
        if not torch.allclose(found, expected, rtol=0, atol=limit):
            raise UserError(
                f"{CANNOT}: computed {what} its logits differ by "
                f"{float((found - expected).abs().max()):.3g}: a token depends on others by more than causal attention"
            )


def _logits(served: Served, tokens: list[int], first: int) -> Tensor:
    """Return the logits of the last token, when the `first` ones come at once."""
    flow = Flow(served.graph)
    (stage,) = partition(flow, {op.name: 0 for op in flow.operators})
    whole = ServedStage(stage, served.weights)
    cache, found = whole.cache(len(tokens)), torch.empty(0)
    for start, end in [(0, first), *((n, n + 1) for n in range(first, len(tokens)))]:
        given = torch.tensor([tokens[start:end]])
        found = whole.run(cache, start, {Ref(token_input(flow)): given}, end - start)[served.graph.loss]
    return found


def token_input(flow: Flow) -> str:
    """Name of the op whose value the tokens are."""
    return next(op.name for op in flow.graph.ops if op.kind == "placeholder" and op.target == TOKENS)
