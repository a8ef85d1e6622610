"""Optimizers chosen by parameter name, clipping by the global norm, and the outer parameters and their step (DiLoCo,
Alg. 1; Streaming DiLoCo, Alg. 2).

    delta = mean over replicas k of (outer - w_k)              outer <- Nesterov(outer, delta)
    w_k <- mixing x w_k + (1 - mixing) x outer                 DiLoCo mixes nothing: w_k <- outer

Every replica averages to the same bits and makes the same outer step: outer parameters need not travel.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import to_device
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import check_options
from isthmus.plans import OuterOptimizer
from isthmus.training.gradients import STRETCH, in_stretches
from isthmus.training.learning_rate import CONSTANT, LearningRate, TorchSchedule
from isthmus.wire_types import NotNegative, Table, Text

STEP = "step"
"""The number of updates of a parameter in an optimizer's state. All else there has the parameter's elements."""
FUSED_KINDS = ("cuda", "xpu", "mps", "checked")  # accelerators for which torch has fused optimizers
CANNOT = {  # optimizers of torch that no step of ours can take, and why
    "LBFGS": "it computes the loss several times a step",
    "SparseAdam": "it takes sparse gradients alone",
}
Share = Annotated[float, Meta(ge=0, lt=1)]


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One optimizer and the parameters that it updates (FusionLLM: optimizers per op)."""

    name: Literal["sgd", "adamw", "muon"] = "adamw"  # AdamW, SGD, or Muon, which is of matrices alone.
    pattern: Text = "*"  # Shell pattern over the module's own parameter names. The first entry that matches wins.
    lr: NotNegative = 1e-3  # Learning rate, before the factor of [learning_rate].
    momentum: Share = 0.0  # The momentum of SGD and Muon, for which 0.95 is usual.
    nesterov: bool = False  # Nesterov momentum, for SGD and Muon.
    betas: tuple[Share, Share] = (0.9, 0.999)  # AdamW: decay of the mean of gradients, and of their squares.
    eps: NotNegative = 1e-8  # AdamW: added to the denominator.
    weight_decay: NotNegative = 0.0  # Decoupled for AdamW and Muon, added to gradients for SGD.
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """Muon: how the learning rate follows a matrix's shape; `match_rms_adamw` takes one that suits AdamW."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel for all parameters; auto: on accelerators whose torch has it. It rounds differently."""


class AnyOptimizerConfig(OptimizerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the optimizers of a pipeline's job, or a class of torch.optim by name."""

    torch: Text = ""  # A class of torch.optim in place of `name`, as `RMSprop`.
    options: Table[Text, object] = {}  # Its arguments, but the learning rate, which is `lr`.

    def __post_init__(self) -> None:
        if self.options and not self.torch:
            raise ValueError("options: got some without the key torch, expected the name of an optimizer there")
        if not self.torch:
            return  # made for every round of a client: the fields of a struct take long to list
        ours = {f.name: f.default for f in msgspec.structs.fields(OptimizerConfig) if f.name not in ("pattern", "lr")}
        given = [name for name, default in ours.items() if getattr(self, name) != default]
        if given:
            raise ValueError(f"{given[0]}: got it beside torch, expected the optimizer's arguments in options")

    @property
    def called(self) -> str:
        """Its name for people."""
        return self.torch or self.name

    def set_to(self, settings: Mapping[str, object]) -> AnyOptimizerConfig:
        """With a learning rate, and a momentum or betas where a schedule cycles them."""
        if not self.torch:
            return msgspec.structs.replace(self, **settings)
        rest = {name: value for name, value in settings.items() if name != "lr"}
        return msgspec.structs.replace(self, lr=settings["lr"], options={**self.options, **rest})


class Optimizers:
    """The optimizers of one set of named parameters."""

    def __init__(
        self,
        configs: Sequence[OptimizerConfig],
        parameters: Mapping[str, nn.Parameter],
        rate: LearningRate = CONSTANT,
        steps: int = 1,
    ) -> None:
        """Make the optimizers of a run of `steps`, in which the learning rate is `rate`."""
        self._parameters = dict(parameters)
        groups: dict[int, list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            groups.setdefault(choose(configs, name), []).append(parameter)
        self._made = [
            (settings_of(configs[i], rate, steps), _make(configs[i], group)) for i, group in sorted(groups.items())
        ]

    def step(self, step: int = 0) -> None:
        """Apply every optimizer to the parameters' `.grad` in this step of training, then drop the gradients."""
        for settings, optimizer in self._made:
            for group in optimizer.param_groups:
                group.update(settings(step))
            optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for _, optimizer in self._made:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """`optimizer.<parameter>.<key>` -> tensor, for every tensor that an optimizer keeps."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for _, optimizer in self._made:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        found[f"optimizer.{name}.{key}"] = value
        return found

    def load(self, state: Mapping[str, Tensor], accelerator: Accelerator = HOST) -> None:
        """Take back what `state` gave, whatever the cut was then. The parameters lie on `accelerator`."""
        owners = {id(p): o for _, o in self._made for group in o.param_groups for p in group["params"]}
        for name, parameter in self._parameters.items():
            prefix = f"optimizer.{name}."
            found = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            found = {k: v for k, v in found.items() if k not in NOT_OPTIMIZERS}
            if found:
                owner = owners[id(parameter)]
                # AdamW counts its steps on the CPU, wherever the parameter is, unless it is fused
                counts_here = not owner.defaults.get("fused")
                owner.state[parameter] = {
                    k: v.clone() if k == STEP and counts_here else to_device(accelerator, v).clone()
                    for k, v in found.items()
                }


def settings_of(config: OptimizerConfig, rate: LearningRate, steps: int) -> Callable[[int], Mapping[str, object]]:
    """Return the settings of the optimizer's groups by step. UserError for a scheduler that torch refuses."""
    if rate.torch:
        return TorchSchedule(lambda: _make(config, [nn.Parameter(torch.zeros(1, 1))]), rate, steps)
    return lambda step: {"lr": config.lr * rate.factor(step, steps)}


def choose(configs: Sequence[OptimizerConfig], parameter: str) -> int:
    """Index of the first config whose pattern matches; UserError when none does."""
    for index, config in enumerate(configs):
        if fnmatch.fnmatchcase(parameter, config.pattern):
            return index
    raise UserError(f"optimizer: no pattern matches parameter {parameter!r}: got {[c.pattern for c in configs]}")


class _NotCompiled(torch.optim.Optimizer):
    """torch's methods without what they do for torch.compile: at the first call they import its compiler, which takes a
    second or two and 90 MB in every process of a device."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class _SGD(_NotCompiled, torch.optim.SGD):
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class _AdamW(_NotCompiled, torch.optim.AdamW):
    """torch's, a stretch of a large parameter at a time: its loop makes two tensors of each parameter's size. Each
    element's new value is the same."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:  # pyright: ignore
        """Fill the lists with the group's tensors: parameters, gradients, means, squares, AMSGrad's (none), counts."""
        complex_numbers: bool = super()._init_group(group, *lists)  # pyright: ignore
        in_a_loop = not (group["fused"] or group["foreach"]) and all(t.device.type == "cpu" for t in lists[0])
        if not in_a_loop or all(t.numel() <= STRETCH for t in lists[0]):
            return complex_numbers
        *elementwise, _, counts = lists
        whole = [*zip(*elementwise, counts, strict=True)]
        for each in lists:
            each.clear()
        for *tensors, count in whole:
            flat = all(map(Tensor.is_contiguous, tensors))
            parts = [in_stretches(t) if flat else (t,) for t in tensors]
            for into, stretches in zip(elementwise, parts, strict=True):
                into.extend(stretches)
            counts += [count.clone() for _ in parts[0][1:]] + [count]  # each counts up its own
        return complex_numbers


class _Muon(_NotCompiled, torch.optim.Muon):
    step = torch.no_grad()(inspect.unwrap(torch.optim.Muon.step))


def _make(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(config, AnyOptimizerConfig) and config.torch:
        return _of_torch(config, parameters)
    lr, decay, momentum, nesterov = config.lr, config.weight_decay, config.momentum, config.nesterov
    if config.name == "muon":
        adjusted = config.adjust_lr_fn
        return _Muon(parameters, lr, decay, momentum=momentum, nesterov=nesterov, adjust_lr_fn=adjusted)
    kind = parameters[0].device.type
    fused = kind in FUSED_KINDS if config.fused == "auto" else config.fused
    if config.fused is True and kind not in (*FUSED_KINDS, "cpu"):
        raise UserError(f"optimizer: fused: got true for {kind}, which has none: expected false or 'auto'")
    # None: torch chooses between a loop and kernels for many tensors, by device
    if config.name == "sgd":
        return _SGD(parameters, lr, momentum, weight_decay=decay, nesterov=nesterov, fused=fused or None)
    return _AdamW(parameters, lr, config.betas, config.eps, decay, fused=fused or None)


def _of_torch(config: AnyOptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """UserError for a class that torch has not, and for what it refuses."""
    if config.torch in CANNOT:
        raise UserError(f"optimizer.torch: got {config.torch!r}, expected another optimizer: {CANNOT[config.torch]}")
    others = {"Optimizer", *CANNOT}
    names = [name for name in torch.optim.__all__ if name[0].isupper() and name not in others]
    if config.torch not in names:
        raise unknown_name("optimizer.torch", config.torch, names)
    kind = getattr(torch.optim, config.torch)
    check_options(f"optimizer option of {config.torch}", kind, config.options, {"params", "lr"})
    step = torch.no_grad()(inspect.unwrap(kind.step))
    made = cast("Callable[..., torch.optim.Optimizer]", type(config.torch, (_NotCompiled, kind), {"step": step}))
    try:
        return made(parameters, lr=config.lr, **config.options)
    except Exception as e:  # each class raises its own
        raise UserError(f"optimizer: {config.torch}: {' '.join(str(e).split())}") from e


NO_GRADIENT = -1.0


def gradient_norms(gradients: Sequence[Tensor | None], device: torch.device = HOST.device) -> Tensor:
    """The 2-norm of each gradient, -1 where there is none: float32, shape [len(gradients)], on the gradients' device,
    which is `device`. The host waits for none of them."""
    if not gradients:
        return torch.empty(0, device=device)
    missing = torch.full((), NO_GRADIENT, device=device)
    return torch.stack([missing if g is None else torch.linalg.vector_norm(g).float() for g in gradients])


def clip(gradients: Sequence[Tensor], norms: Tensor, max_norm: float) -> Tensor:
    """Scale gradients in place so that the global norm is at most `max_norm`; returns the norm before, where it is.

    `norms` are those of all parameters of the model in the module's own order, so that the result has the same
    bits as torch.nn.utils.clip_grad_norm_ on the whole module, which leaves parameters without gradient out.
    """
    there = norms != NO_GRADIENT
    # The host would wait for an accelerator to say how many there are. On the CPU zeros between would change the sum's
    # last bits.
    given = norms[there] if norms.device.type == "cpu" else torch.where(there, norms, 0.0)
    total = torch.linalg.vector_norm(given)
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.device))
    return total


VALUE, MOMENTUM, DELTA = "outer", "outer_momentum", "outer_delta"
OUTER_KEYS = frozenset({VALUE, MOMENTUM, DELTA})  # a parameter's outer state in a checkpoint, beside its optimizer's
PREVIOUS = "previous"  # and its version before the last update, where a step computes with that (`training.delayed`)
NOT_OPTIMIZERS = OUTER_KEYS | {PREVIOUS}


class OuterStep:
    """Some outer tensors, and the step that torch's SGD makes with them. `start`: kept, and changed in place."""

    def __init__(self, start: Sequence[Tensor], config: OuterOptimizer) -> None:
        self._values = [nn.Parameter(value, requires_grad=False) for value in start]
        self._mixing = config.mixing
        nesterov = config.momentum > 0
        self._sgd = _SGD(self._values, config.rate, momentum=config.momentum, nesterov=nesterov)

    @property
    def values(self) -> list[Tensor]:
        return [value.detach() for value in self._values]

    @property
    def momenta(self) -> list[Tensor | None]:
        """One for each value; None before the first step, and without momentum."""
        return [self._sgd.state.get(value, {}).get("momentum_buffer") for value in self._values]

    def deltas(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return how far a replica's tensors are from the outer ones."""
        return [outer - mine for outer, mine in zip(self.values, own, strict=True)]

    def step(self, deltas: Sequence[Tensor]) -> None:
        """Go down by the mean of the replicas' deltas."""
        for value, delta in zip(self._values, deltas, strict=True):
            value.grad = delta
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)

    @torch.no_grad()
    def mix_into(self, own: Sequence[Tensor]) -> None:
        """Bring a replica's tensors to the outer ones, but for the share that stays."""
        for mine, outer in zip(own, self.values, strict=True):
            mine.lerp_(outer, 1 - self._mixing)

    @torch.no_grad()
    def load(self, values: Sequence[Tensor], momenta: Sequence[Tensor | None]) -> None:
        """Go on from saved values, copied to where the own ones are, and momenta."""
        for value, saved, momentum in zip(self._values, values, momenta, strict=True):
            value.copy_(saved)
            self._sgd.state.pop(value, None)
            if momentum is not None:
                self._sgd.state[value] = {"momentum_buffer": momentum.clone()}


def joined(saved: Mapping[str, Tensor], parameters: Sequence[str]) -> dict[str, Tensor]:
    """Flat, by key, what a checkpoint holds for all of these parameters (own names)."""
    found: dict[str, Tensor] = {}
    for key in sorted(OUTER_KEYS):
        names = [f"optimizer.{name}.{key}" for name in parameters]
        if all(name in saved for name in names):
            found[key] = torch.cat([saved[name].reshape(-1) for name in names])
    return found
