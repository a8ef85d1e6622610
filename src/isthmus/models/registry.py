"""The models by name: ours, Hugging Face's, those of other packages, and those that a caller gives as Python
objects."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar
from unittest import mock

import msgspec
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from isthmus.combinations import refused
from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.extensions import check_arguments, import_object, load_third_party, read_options, third_party
from isthmus.graph.capture_errors import built_by, reason_of, user_line
from isthmus.graph.metrics import LossAndOutput
from isthmus.models import hugging_face
from isthmus.models.boundary import BoundaryOptions, add_boundary
from isthmus.models.gpt import GPT, GPTConfig
from isthmus.models.lora import LoraOptions, add_lora
from isthmus.models.mlp import CNN, MLP, CNNConfig, MLPConfig
from isthmus.models.unet import UNet, UNetConfig
from isthmus.option_docs import OptionDoc, argument_docs, first_line, option_docs
from isthmus.wire_types import Table, Text

ENTRY_POINTS = "isthmus.models"
ValueT = TypeVar("ValueT")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model to build.

    `name` is one of `model_names()`, or `hf:<transformers class>`, or `package.module:callable`; `options` are
    JSON values that the model's config or the callable takes. Naming a callable runs it, so a spec is only
    ever read from the user's own job file, never from a link.
    """

    name: Text
    """One of `isthmus models`, `hf:CLASS` for a class of transformers, or `package.module:callable` of your own."""
    options: Table[Text, object] = {}  # The model's own settings: `isthmus describe NAME` lists them.
    lora: LoraOptions | None = None
    """With this table the model stays as it is, and small matrices beside its layers are trained (`peft`)."""
    boundary: BoundaryOptions | None = None
    """With this table the model's residual stream is rewritten so that a cut sends little."""

    def __post_init__(self) -> None:
        if self.boundary is None or self.boundary.method == "none":
            return
        if self.lora is not None:
            raise ValueError(str(refused("a boundary", "LoRA", "one")))
        if self.is_pretrained:
            raise ValueError(str(refused("a boundary", "pretrained weights", "one")))

    @property
    def is_pretrained(self) -> bool:
        """Return whether its weights are read from a folder or the hub."""
        return self.name == "hf" and not self.options.get("random_weights")

    @property
    def base_is_kept(self) -> bool:
        """Return whether what is not trained can be read again where it came from: checkpoints leave it out."""
        return self.lora is not None and self.is_pretrained


_OURS: Mapping[str, tuple[type[msgspec.Struct], Callable[[Any], nn.Module]]] = {
    "cnn": (CNNConfig, CNN),
    "gpt": (GPTConfig, GPT),
    "mlp": (MLPConfig, MLP),
    "unet": (UNetConfig, UNet),
    "hf": (hugging_face.PretrainedOptions, hugging_face.build_pretrained),
}
"""Each model's options, and the function that builds it from them."""


def model_names() -> list[str]:
    """The names that `build_model` knows, entry points of the group `isthmus.models` included, sorted."""
    return sorted({*_OURS, *hugging_face.BY_NAME, *third_party(ENTRY_POINTS)})


def is_built_in(spec: ModelSpec) -> bool:
    """Return whether the module follows from the spec and installed packages alone: from no file and no code of the
    user's."""
    return (spec.name in _OURS and spec.name != "hf") or spec.name in hugging_face.BY_NAME


def is_own_code(spec: ModelSpec) -> bool:
    """Return whether the name is a `module:callable` that is imported from the user's own files."""
    return ":" in spec.name and not spec.name.startswith(("hf:", GIVEN))


def build_model(spec: ModelSpec) -> nn.Module:
    """The module of `spec` with fresh weights, on torch's default device, in train mode.

    Its `forward(**columns)` returns a scalar loss, or a dict with `loss` first, or (loss_sum, count, ...). Weights
    are drawn from torch's global generator, those of LoRA and bottlenecks last: the caller sets the seed. Works under
    `FakeTensorMode` too. Raises `UserError` for an unknown model or option, an option's value, or a callable that
    cannot be imported.
    """
    module = _build(spec)
    if spec.boundary is not None:
        module = add_boundary(module, spec.boundary)
    return module if spec.lora is None else add_lora(module, spec.lora)


def model_on_meta(spec: ModelSpec) -> nn.Module:
    """The same module without values, on torch's meta device: it takes no memory. Errors as of `build_model`."""
    # `Module.to` refuses parameters that have weak references, and the fake mode's memory keeps some.
    with FakeTensorMode(), mock.patch("weakref.getweakrefs", lambda _: ()):
        module = build_model(spec)
    made: dict[Tensor, Tensor] = {}
    for part in module.modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for name, tensor in own:
            if tensor not in made:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                parameter = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
            setattr(part, name, made[tensor])
    return module


def _build(spec: ModelSpec) -> nn.Module:
    name = spec.name
    if name in _OURS:
        options, build = _OURS[name]
        return build(read_options(name, spec.options, options))
    if name in hugging_face.BY_NAME:
        class_name, defaults = hugging_face.BY_NAME[name]
        return hugging_face.build_from_class(name, class_name, {**defaults, **spec.options})
    if name.startswith("hf:"):
        return hugging_face.build_from_class(name, name.removeprefix("hf:"), spec.options)
    if name.startswith(GIVEN):
        return build_given(name)
    if ":" in name:
        return _call(name, import_object("model", name), spec.options)
    others = third_party(ENTRY_POINTS)
    if name in others:
        return _call(name, load_third_party(others[name]), spec.options)
    raise unknown_name("model", name, model_names())


def summarize_model(name: str) -> str:
    """One line on a model, without importing Hugging Face's library. UserError as `describe_model`."""
    if name in hugging_face.BY_NAME and find_spec("transformers") is not None:
        return hugging_face.summarize_class(hugging_face.BY_NAME[name][0])
    return describe_model(name)[0]


def describe_model(name: str) -> tuple[str, tuple[OptionDoc, ...]]:
    """One line on a model, and its options. UserError for an unknown name, and for a package that cannot be read."""
    if name in _OURS:
        options, build = _OURS[name]
        return first_line(options if name == "hf" else build), option_docs(options)
    if name in hugging_face.BY_NAME:
        class_name, defaults = hugging_face.BY_NAME[name]
        return hugging_face.describe_class(class_name, defaults)
    if name.startswith("hf:"):
        return hugging_face.describe_class(name.removeprefix("hf:"), {})
    others = third_party(ENTRY_POINTS)
    if ":" not in name and name not in others:
        raise unknown_name("model", name, model_names())
    build = import_object("model", name) if ":" in name else load_third_party(others[name])
    return first_line(build), argument_docs(build)


def _call(name: str, build: object, options: Mapping[str, object]) -> nn.Module:
    if not callable(build):
        raise UserError(f"model {name!r}: expected a callable that returns an nn.Module, got {build!r}")
    check_arguments("model", name, build, options)
    try:
        module: object = build(**options)
    except IsthmusError:
        raise
    except Exception as error:  # somebody else's code
        where = f"building {built_by(error)} failed{user_line(error)}"
        raise UserError(f"model {name!r}: {where}: {reason_of(error)}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model {name!r}: expected it to return an nn.Module, got {type(module).__name__}")
    return module


GIVEN = "given:"
LOSS = "+loss"  # in the name of a model that was given with a loss
_given: dict[str, nn.Module | Callable[[], nn.Module]] = {}  # models by name, in this process alone


def give_model(model: nn.Module | Callable[[], nn.Module]) -> str:
    """The name by which a job refers to the module, or to what builds one. The same for modules of one class with
    parameters of the same names and shapes: a call that resumes the run gives an equal model again."""
    if isinstance(model, nn.Module):
        form = hashlib.sha256(repr([(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()]).encode())
        kind = f"{type(model.model).__name__}{LOSS}" if isinstance(model, WithLoss) else type(model).__name__
        name = f"{GIVEN}{kind}-{form.hexdigest()[:8]}"
    else:
        name = f"{GIVEN}{getattr(model, '__name__', type(model).__name__)}"
    _given[name] = model
    return name


class WithLoss(nn.Module):
    """A model and a loss behind one forward, which takes columns."""

    title = "loss"  # its name in errors: what the model raises is said of the model's own modules

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], inputs: tuple[str, ...], target: str) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._inputs, self._target = inputs, target

    def forward(self, **columns: Tensor) -> LossAndOutput:
        output = self.model(*(columns[name] for name in self._inputs))
        return LossAndOutput(loss=self.loss(output, columns[self._target]), output=output)


def own_names(name: str, weights: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Weights of the model called `name`, under the names that the module which was given has for them: those of a loss
    around it are left out."""
    if not name.startswith(GIVEN) or not (f"{LOSS}-" in name or name.startswith(f"{GIVEN}{WithLoss.__name__}-")):
        return dict(weights)
    prefix = "model."  # the field of `WithLoss`
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def build_given(name: str) -> nn.Module:
    """A copy of the module, with its weights; under `FakeTensorMode` without them. UserError where it was not given."""
    if name not in _given:
        what = "is a Python object of another process: pass it again to `isthmus.train` or `isthmus.federate`"
        raise UserError(f"model {name!r}: {what}")
    model = _given[name]
    if not isinstance(model, nn.Module):
        return model()
    if detect_fake_mode() is None:
        return copy.deepcopy(model).train()
    held: list[Tensor] = [*model.parameters(), *model.buffers()]
    storages: dict[int, Tensor] = {}
    return copy.deepcopy(model, {id(tensor): _fake(tensor, storages) for tensor in held}).train()


def _fake(tensor: Tensor, storages: dict[int, Tensor]) -> Tensor:
    """Return a tensor of the same sizes. Those that share memory do so again: a capture refuses trained ones."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    else:
        memory = tensor.untyped_storage()
        elements = memory.nbytes() // tensor.element_size()
        whole = storages.setdefault(memory._cdata, torch.empty(elements, dtype=tensor.dtype))  # pyright: ignore[reportPrivateUsage]
        empty = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
