"""`attach`: checks, one private process group, the same start everywhere, and the mode."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from isthmus.combinations import refused
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_object
from isthmus.planners.sync import SYNC_PLANNERS
from isthmus.sync.averaging import Averager, codec_name
from isthmus.sync.dream import OURS, PAPER, Dream
from isthmus.sync.every_step import AscWfbp, EveryStep
from isthmus.sync.exchange import gather
from isthmus.sync.layers import flatten
from isthmus.sync.mode import DiLoCo, LocalSGD, Mode, Monitor, Setting, Streaming
from isthmus.sync.options import Options
from isthmus.sync.scheduled import partial_sync
from isthmus.sync.sync import Sync
from isthmus.sync.updates import Updates, attached
from isthmus.training.compression import DeltaCodec


def _decoupled(setting: Setting) -> Mode:
    """Imported when it is needed: it brings sockets and TLS along."""
    make = import_object("isthmus.sync", "isthmus.sync.decoupled:DecoupledMode")
    return cast("Callable[[Setting], Mode]", make)(setting)


_MODES: Mapping[str, Callable[[Setting], Mode]] = {
    "s-sgd": partial(EveryStep, in_one=True),
    "asc-wfbp": AscWfbp,
    "every-step": EveryStep,
    "local": LocalSGD,
    "outer": DiLoCo,
    "streaming": Streaming,
    "partial": partial_sync,
    "dream": partial(Dream, method=OURS),
    "dreamddp": partial(Dream, method=PAPER),
    "decoupled": _decoupled,
}

DEFAULT_OPTIONS = Options()


def mode_names() -> list[str]:
    """Every name that `attach` takes as `mode`, sorted."""
    return sorted(_MODES)


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    mode: str = "dream",
    period: int = 5,
    group: dist.ProcessGroup | None = None,
    options: Options = DEFAULT_OPTIONS,
    codec: DeltaCodec | None = None,
) -> Sync:
    """Keep the replicas of `model` together; `sync.step()` then takes the place of `optimizer.step()`.

    Every worker of `group` (the default group if None) must call it with the same model, mode, period and options.
    All start from worker 0's parameters. They are averaged over a group of their own, so the caller's is free for
    other use. `period` is H: the steps in which everything is averaged once; 'every-step', 's-sgd' and 'asc-wfbp'
    average gradients in each and use it for their reports only. `codec` packs what `outer` and `streaming` exchange.
    With 'decoupled' no worker waits for another until `close`.

    Raises UserError without a process group, for an unknown mode, a period below 1, an option that the mode does not
    read, a model that differs between workers, or an optimizer that does not fit.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> net = torch.nn.Linear(4, 1)
    >>> sync = isthmus.sync.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), mode="outer", period=5)
    >>> net(torch.ones(2, 4)).sum().backward()
    >>> sync.step()
    >>> sync.close()
    >>> torch.distributed.destroy_process_group()
    """
    _check_arguments(model, optimizer, mode, period, options, codec)
    private = _private(group, model)
    settings = _Settings(mode, period, codec_name(codec), type(optimizer).__name__, options)
    workers = _check_alike(model, settings, private)
    _start_alike(model, private)
    flat = flatten(model, options.smallest_layer_bytes)
    updates = Updates(optimizer, flat)
    averager = Averager(private, options.weight, options.at_once if mode == "asc-wfbp" else 1)
    setting = Setting(
        module=model,
        model=flat,
        updates=updates,
        averager=averager,
        monitor=Monitor(averager, workers),
        period=period,
        options=options,
        codec=codec,
    )
    try:
        return Sync(mode, _MODES[mode](setting), setting)
    except UserError:
        updates.detach()
        averager.close()
        raise


def _check_arguments(
    model: nn.Module, optimizer: Optimizer, mode: str, period: int, options: Options, codec: DeltaCodec | None
) -> None:
    kinds: list[tuple[str, object, type]] = [
        ("model", model, nn.Module),
        ("optimizer", optimizer, Optimizer),
        ("options", options, Options),
    ]
    for name, given, kind in kinds:
        if not isinstance(given, kind):
            raise UserError(f"{name}: got {type(given).__name__}, expected {kind.__module__}.{kind.__qualname__}")
    if str(mode) not in _MODES:
        raise unknown_name("sync mode", str(mode), _MODES)
    if not isinstance(period, int) or isinstance(period, bool) or not 1 <= period < 1 << 31:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"period: got {period!r}, expected at least 1 step, in whole numbers")
    if options.planner is not None and options.planner not in SYNC_PLANNERS:
        raise unknown_name("sync option 'planner'", options.planner, SYNC_PLANNERS)
    if not dist.is_initialized():
        raise UserError(
            "isthmus.sync.attach: no process group. Call torch.distributed.init_process_group(...) first, and start "
            "the script with torchrun"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UserError("isthmus.sync.attach: got a DistributedDataParallel, expected the module inside (model.module)")
    options.check_read(mode, codec=codec is not None)
    if codec is not None and mode not in ("outer", "streaming"):
        why = "Decoupled(codec=...) is the codec of 'decoupled'" if mode == "decoupled" else ""
        raise refused("a codec", "modes without deltas", f"{type(codec).__name__} with mode {mode!r},", why=why)
    if codec is not None and not _is_codec(codec):
        raise UserError(f"codec: got {codec!r}, expected a codec such as isthmus.training.compression.Int8()")
    if attached(optimizer):
        raise UserError("isthmus.sync.attach: this optimizer is attached already: close() its Sync first")
    _check_own_memory(model)


def _check_own_memory(model: nn.Module) -> None:
    """Raises UserError for what cannot be written in place, element by element."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(f"model: {name!r} has no shape yet: run one forward before isthmus.sync.attach")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise UserError(
                f"model: {name!r} was expanded, so that elements share memory: expected memory of its own, as "
                ".contiguous() gives"
            )


def _is_codec(codec: object) -> bool:
    """A text encodes too, and so does a class, which is to be called first."""
    packs = all(callable(getattr(codec, name, None)) for name in ("encode", "decode"))
    return packs and not isinstance(codec, str | type)


def _private(group: dist.ProcessGroup | None, model: nn.Module) -> dist.ProcessGroup:
    """The same workers in a group that nobody else sends in."""
    made = None
    if group is None or isinstance(group, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
        ranks = dist.get_process_group_ranks(group)
        # Among some, torch names a group by how many each of them has: where all take part nobody has to have as many.
        made = dist.new_group(
            ranks,
            backend=_backend(group, model),
            timeout=_timeout(group, model),
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
    if not isinstance(made, dist.ProcessGroup):
        # torch.distributed.new_group gives a number to those who are not in what it has made.
        raise UserError(
            f"group: got {group!r}, expected a process group that this process is in: call attach only in the workers "
            "that are"
        )
    return made


def _backend(group: dist.ProcessGroup | None, model: nn.Module) -> str:
    """The group's for the model's kind of device: it may have several, as it has after `init_process_group()`."""
    of_device = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    used = {tensor.device.type for tensor in itertools.chain(model.parameters(), model.buffers())}
    for kind in sorted(used - of_device.keys()):
        raise UserError(
            f"the model is on {kind!r}, for which the process group has no backend (it has "
            f"{', '.join(f'{backend} for {device}' for device, backend in of_device.items())})"
        )
    return of_device[used.pop()] if len(used) == 1 else dist.get_backend(group)


def _timeout(group: dist.ProcessGroup | None, model: nn.Module) -> timedelta | None:
    """Return how long the caller's group waits for others; None for torch's own choice, half an hour on Gloo."""
    whole = dist.group.WORLD if group is None else group
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    if whole is None or tensor is None:
        return None
    # torch has no public name for it.
    backend = whole._get_backend(tensor.device)  # pyright: ignore[reportPrivateUsage]
    return getattr(getattr(backend, "options", None), "_timeout", None)


class _Settings(msgspec.Struct, frozen=True):
    mode: str
    period: int
    codec: str
    optimizer: str  # its class: what it keeps of a parameter may be averaged
    options: Options


class _Worker(msgspec.Struct, frozen=True):
    """A worker's name, and the settings and parameters that must be alike on all workers."""

    host: str
    settings: _Settings
    parameters: list[tuple[str, list[int], str]]
    """Name, shape and dtype of every parameter and buffer, trainable or not."""


def _check_alike(model: nn.Module, settings: _Settings, group: dist.ProcessGroup) -> tuple[str, ...]:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    described = [
        (name, list(t.shape), f"{t.dtype}{'' if t.requires_grad else ', not trainable'}") for name, t in tensors
    ]
    workers = gather(_Worker(socket.gethostname(), settings, described), _Worker, group)
    for rank, worker in enumerate(workers):
        _compare(workers[0], worker, rank)
    return tuple(f"worker {rank} on {worker.host}" for rank, worker in enumerate(workers))


def _compare(first: _Worker, other: _Worker, rank: int) -> None:
    for one, two in itertools.zip_longest(first.parameters, other.parameters):
        if one != two:
            raise UserError(
                f"the models differ: worker 0 has {_text(one)} where worker {rank} has {_text(two)}. Expected the same "
                "model on every worker"
            )
    mine, theirs = (msgspec.to_builtins(worker.settings) for worker in (first, other))
    for field in ("mode", "period", "codec", "optimizer"):
        if mine[field] != theirs[field]:
            raise UserError(f"{field}: worker 0 has {mine[field]!r}, worker {rank} {theirs[field]!r}: must be alike")
    for field, value in mine["options"].items():
        other_value = theirs["options"][field]
        if field != "weight" and value != other_value:
            raise UserError(
                f"sync option {field!r}: worker 0 has {value!r}, worker {rank} {other_value!r}: must be alike"
            )


def _text(described: tuple[str, list[int], str] | None) -> str:
    if described is None:
        return "nothing more"
    name, shape, kind = described
    return f"{name!r} {shape} ({kind})"


@torch.no_grad()
def _start_alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    source = dist.get_global_rank(group, 0)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        contiguous = tensor.detach().contiguous()
        # As bytes: Gloo knows no short integers, no float8 and no complex numbers.
        dist.broadcast(contiguous.view(-1).view(torch.uint8), source, group=group)
        tensor.copy_(contiguous)
