"""The handle that takes the place of `optimizer.step()`.

One worker's whole state in one safetensors file: model, optimizer and sync, for a restart in the middle of a period.

Replicas differ within a period, so every worker keeps a file of its own. Learning rates and the like are the script's.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from isthmus.atomic_write import atomic_path
from isthmus.errors import UserError
from isthmus.plans.sync import SyncPlan
from isthmus.sync.averaging import PendingAverage, codec_name
from isthmus.sync.dream import Dream
from isthmus.sync.exchange import gather, to_bytes
from isthmus.sync.hooks import GradientHooks
from isthmus.sync.layers import PackedTensors, pack
from isthmus.sync.mode import Mode, PeriodReport, Setting, restored_document
from isthmus.sync.profile import LinkModel, WorkerTimes
from isthmus.sync.updates import Closure
from isthmus.training.stored import save_tensors, stored_tensors


class SyncStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A view of one worker, in seconds and bytes."""

    mode: str
    steps: int
    sent_bytes: int
    """Bytes that this worker sent for averages: 2 (K - 1) / K of the averaged tensors, as in a ring. `decoupled`: bytes
    of its contributions."""
    samples: int | None  # `decoupled`: of all workers so far, as far as this one knows
    workers: tuple[str, ...]
    last_period: PeriodReport | None  # the newest that all workers have reported: one period late
    slowest: str | None
    """The worker that the others wait for, and what it costs them per step; None until a period was measured."""
    behind_s: float
    plan: SyncPlan | None
    plans: int  # how many were made, `dream` only
    link: LinkModel | None  # as `dream` has measured it
    times: WorkerTimes | None  # this worker's newest steps, as `dream` has measured them
    layer_bytes: dict[str, int]  # the layers that averages are made of, in the order of registration


class Sync:
    """One model's replicas, kept together in one of the modes. Made by `attach`."""

    def __init__(self, name: str, mode: Mode, setting: Setting) -> None:
        self.mode_name = name
        self._mode = mode
        self._setting = setting
        self._hooks: GradientHooks | None = None
        if mode.in_backward:
            self._hooks = GradientHooks(setting.model.layers, self._ready, self._backward_ended)
        self._held = {name: buffer for name, buffer in setting.module.named_buffers() if buffer.is_floating_point()}
        self._buffers_sent: tuple[PackedTensors, PendingAverage] | None = None
        self._closed = False

    def step(self, closure: Closure | None = None, *, scaler: GradScaler | None = None) -> Tensor | None:
        """Update the parameters and average what is due. To be called once per step, by every worker.

        With `closure`, as `optimizer.step(closure)`; with `scaler`, as `scaler.step(optimizer)`, and `scaler.update()`
        is still to be called. Returns the closure's loss. Raises UserError for a use that the mode does not allow.
        """
        if self._closed:
            raise UserError("sync.step(): this Sync is closed: attach anew, or call optimizer.step()")
        self._setting.model.check_in_place()
        self._setting.updates.check_averaged()
        mode = self._mode
        self._send_buffers()
        loss = mode.step(closure, scaler)
        ends_period = mode.ends_period
        mode.count()
        if self._hooks is not None:
            self._hooks.reset()
        self._receive_buffers()
        self._setting.monitor.stepped()
        if ends_period:
            mode.period_ended(self._setting.monitor.period_ended(mode.steps))
        mode.stepped()
        return loss

    def wait(self) -> None:
        """Wait for averages that reach into the next forward (option `forward_overlap`).

        A forward and a state dict do so themselves. Anything else that reads or writes parameters between steps, such
        as a moving average of them, must call this first.
        """
        self._mode.wait()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Gradients are only accumulated inside: for all backward passes of a step but the last."""
        if self._hooks is None:
            yield
            return
        outside, self._hooks.accumulating = self._hooks.accumulating, True
        try:
            yield
        finally:
            self._hooks.accumulating = outside

    @property
    def updates_in_backward(self) -> bool:
        """Return whether the mode updates inside backward, where a change of gradients after it (clipping) is
        refused."""
        return self._mode.updates_in_backward

    def accept_gradients(self) -> None:
        """Take gradients as unchanged since the backward pass, for a caller who knows that they are: to ask for their
        norm by `clip_grad_norm_(parameters, inf)` multiplies them by 1."""
        self._mode.accept_gradients()

    @property
    def optimizer(self) -> Optimizer:
        """The one that was given to `attach`."""
        return self._setting.updates.optimizer

    @property
    def steps(self) -> int:
        """Return how many steps were made, in earlier runs that were resumed too."""
        return self._mode.steps

    @property
    def periods(self) -> int:
        """Return how many periods are over; the same on every worker."""
        return self._mode.periods

    @property
    def finished(self) -> bool:
        """`decoupled` with the option `steps`: no step is to follow, but `close`. Other modes never say so."""
        return self._mode.finished

    def statistics(self) -> SyncStatistics:
        """Return the statistics so far. No communication: every worker may ask at any time."""
        setting, mode = self._setting, self._mode
        last = setting.monitor.last
        dream = mode if isinstance(mode, Dream) else None
        return SyncStatistics(
            mode=self.mode_name,
            steps=mode.steps,
            sent_bytes=mode.sent_bytes,
            samples=mode.samples,
            workers=setting.monitor.workers,
            last_period=last,
            slowest=None if last is None else setting.monitor.workers[last.compute_s.index(max(last.compute_s))],
            behind_s=0.0 if last is None else last.behind_s,
            plan=mode.plan,
            plans=dream.plans if dream else 0,
            link=dream.link if dream else None,
            times=dream.times() if dream else None,
            layer_bytes={layer.name: layer.size_bytes for layer in setting.model.layers},
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that this worker must keep besides its own model and optimizer, in the middle of a period
        too."""
        self.wait()
        return {"made": to_bytes(self._made), "counts": self._mode.counts(), **self._mode.state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken. Load the model and the optimizer of this very worker first, in place.

        To be called by every worker. Raises UserError for the state of another mode, period, codec or model, and for
        states that were taken after different steps.
        """
        for name in ("made", "counts"):
            if name not in state:
                raise UserError(f"saved sync state: {name!r} is missing: expected what Sync.state_dict() gave")
        saved = restored_document(state, "made", dict[str, str])
        for field, value in self._made.items():
            if saved.get(field) != value:
                raise UserError(f"saved sync state: {field}: was made with {saved.get(field)}, expected {value}")
        self._setting.model.check_in_place()
        self.wait()
        self._mode.recount(state["counts"])
        self._check_together()
        self._mode.load(state)

    def _check_together(self) -> None:
        """Workers that are not at the same step would wait for each other in vain, or average what does not belong
        together. Where their periods differ in length (`balance`), they are in the same one."""
        places = gather((self._mode.periods, self._mode.steps), tuple[int, int], self._setting.averager.group)
        compared = 1 if self._setting.options.balance else 2
        for rank, place in enumerate(places):
            if place[:compared] != places[0][:compared]:
                (periods, steps), (others, other_steps) = places[0], place
                raise UserError(
                    f"saved sync state: worker 0's was taken after {steps} steps in {periods} periods, worker {rank}'s "
                    f"after {other_steps} in {others}: expected what all workers saved together"
                )

    @property
    def _made(self) -> dict[str, str]:
        """Settings that must be as they were for a saved state to mean the same."""
        setting = self._setting
        return {"mode": self.mode_name, "period": str(setting.period), "codec": codec_name(setting.codec)}

    def close(self) -> None:
        """Take the hooks away. The parameters stay where they are; the process group may be destroyed then.

        What `streaming` has on its way to a later step is left out: the workers keep their own. `decoupled` waits for
        the other workers' last steps, and leaves all with the merged model; after an error it does not. A second call
        does nothing. Raises what torch.distributed raises where another worker is gone, when all is taken away.

        Where nobody calls it the interpreter's end stops what is on the way, and waits for it no more than a few
        seconds.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as ending:
            ending.callback(self._setting.averager.close)
            ending.callback(self._mode.detach)
            if self._hooks is not None:
                ending.callback(self._hooks.detach)
            ending.callback(self._setting.updates.detach)
            self.wait()
            self._setting.monitor.flush()

    def _backward_ended(self) -> None:
        self._mode.backward_ended()
        if self._mode.resets_each_backward and self._hooks is not None:
            self._hooks.reset()

    def _ready(self, number: int) -> None:
        self._send_buffers()
        self._mode.ready(number)

    def _send_buffers(self) -> None:
        """Running means and variances, so that all workers evaluate the same model.

        The forward has changed them for the last time in this step, so they are averaged behind the backward.
        """
        if self._held and self._mode.ends_period and self._buffers_sent is None:
            # In float64 the mean of equal numbers is that number: what is constant (a mask, positions) has to stay so.
            packed = pack([buffer.double() for buffer in self._buffers()])
            self._buffers_sent = packed, self._setting.averager.start(packed.flats)

    @torch.no_grad()
    def _receive_buffers(self) -> None:
        if self._buffers_sent is not None:
            packed, pending = self._buffers_sent
            with self._setting.monitor.waiting():
                pending.wait()
            packed.copy_to(self._buffers())
            self._buffers_sent = None

    def _buffers(self) -> list[Tensor]:
        """Return the module's buffers under their names at the start: it may have put another tensor there (`self.mean
        = ...`).

        All workers send alike, so one of another shape is left alone, and what was held before goes in its place.
        """
        now = dict(self._setting.module.named_buffers())
        for name, held in self._held.items():
            found = now.get(name, held)
            if (found.shape, found.dtype, found.device) == (held.shape, held.dtype, held.device):
                self._held[name] = found
        return list(self._held.values())


NUMBER = " (number)"  # behind the name of what is no tensor in the optimizer's state


def save_worker(path: Path | str, model: nn.Module, optimizer: Optimizer, sync: Sync) -> None:
    """Write this worker's state, whole or not at all. To be called by every worker after the same step.

    Raises UserError for an optimizer that remembers anything but tensors and numbers, as LBFGS does.
    """
    path = Path(path)
    state = {f"model.{name}": tensor for name, tensor in _tensors(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                suffix = "" if isinstance(value, Tensor) else NUMBER
                state[f"optimizer.{name}.{key}{suffix}"] = _kept(value, optimizer, key)
    state.update({f"sync.{name}": tensor for name, tensor in sync.state_dict().items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_path(path) as new:
            save_tensors(new, state)
    except (OSError, UserError) as e:
        raise UserError(f"{path}: cannot be written: {e}") from None


@torch.no_grad()
def load_worker(path: Path | str, model: nn.Module, optimizer: Optimizer, sync: Sync) -> None:
    """Read what `save_worker` wrote, after `attach`. Raises UserError for a file that does not fit."""
    path = Path(path)
    state = stored_tensors(path)
    own = _tensors(model)
    saved = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    wrong = sorted(own.keys() ^ saved)
    if wrong:
        raise UserError(f"{path}: {wrong[0]!r} is in only one of the file and the model: same model?")
    for name, tensor in own.items():
        if state[f"model.{name}"].shape != tensor.shape:
            raise UserError(
                f"{path}: {name!r}: got shape {tuple(state[f'model.{name}'].shape)}, expected {tuple(tensor.shape)}: "
                "same model?"
            )
    sync.wait()  # what is on its way would come over what is copied
    for name, tensor in own.items():
        tensor.copy_(state[f"model.{name}"].read())
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        kept = {key.removeprefix(prefix): value.read() for key, value in state.items() if key.startswith(prefix)}
        optimizer.state.pop(parameter, None)
        if kept:
            # Counters stay on the host, as torch's optimizers make them.
            optimizer.state[parameter] = {
                key.removesuffix(NUMBER): value.item()
                if key.endswith(NUMBER)
                else value.to(parameter.device)
                if value.shape == parameter.shape
                else value
                for key, value in kept.items()
            }
    mode = {name: value for name, value in state.items() if name.startswith("sync.")}
    sync.load_state_dict({name.removeprefix("sync."): value.read() for name, value in mode.items()})


def _kept(value: object, optimizer: Optimizer, key: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise UserError(
        f"optimizer {type(optimizer).__name__}: its state {key!r} is a {type(value).__name__}: expected tensors and "
        "numbers, which a checkpoint can keep"
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
