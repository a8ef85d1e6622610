"""A mode acts inside backward and at the end of a step.

The exchange of `outer` and `streaming`: the workers average how far they have moved, and each makes the outer step;
and Streaming DiLoCo (2025, Alg. 2), where fragments of the model take turns.

The outer step itself: `training.outer`. Beside the model a worker keeps the outer parameters and their momentum: two
copies.

The fragment of a step, and the step that waits for its exchange: `plans.sync_schedule`.

Each worker broadcasts once in a period how it spends its time, and the worker that delays the others is named.

The exchange of one period is started at its end and read at the end of the next: nobody waits for it.

Every worker on its own for a period, then all meet: local SGD (LSGD; DreamDDP Eq. 2) and DiLoCo (Algorithm 1).

Workers of different speed may make different numbers of steps in a period (DreamDDP, 2.3: H_k).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from isthmus.errors import UserError
from isthmus.plans import OuterOptimizer
from isthmus.plans.exchanges import FragmentSchedule
from isthmus.plans.sync import SyncPlan
from isthmus.sync.averaging import Averager, CompressedAverager, MeasuredAverage
from isthmus.sync.exchange import from_bytes, message_device
from isthmus.sync.layers import FlatModel, Layer, pack, spans
from isthmus.sync.options import Options
from isthmus.sync.updates import Closure, Updates, average_with_state
from isthmus.training.compression import DeltaCodec
from isthmus.training.optim import OuterStep

LOG = logging.getLogger("isthmus.sync")
BEHIND = 1.2  # a worker whose computation takes this many times the others' median, in two periods running, is named
LEAST_BEHIND_S = 2e-3  # less a step is not worth a line


class PeriodReport(msgspec.Struct, frozen=True, kw_only=True):
    """One period, as all workers saw it. Seconds are per step, in the order of the workers."""

    steps: int  # how many had been made at its end
    compute_s: tuple[float, ...]  # between two calls of `sync.step`, data loading included and waiting left out
    wait_s: tuple[float, ...]  # waiting for averages
    divergence: float  # gamma: the mean over the workers, every layer taken just before it was averaged
    link_busy_s: float  # how long averages were on the way in the whole period, as the last worker to start them saw it

    @property
    def usual_s(self) -> float:
        """The median without the slowest worker: of two, the other one."""
        return statistics.median(sorted(self.compute_s)[:-1] or self.compute_s)

    @property
    def behind_s(self) -> float:
        """Seconds per step that the slowest worker costs the others: its time over theirs."""
        return max(self.compute_s) - self.usual_s


class Monitor:
    """Measures this worker's steps. All workers must end their periods alike."""

    def __init__(self, averager: Averager, workers: tuple[str, ...]) -> None:
        self.workers = workers
        self.last: PeriodReport | None = None  # the newest period that all have reported
        self._averager = averager
        self._on_the_way: tuple[torch.Tensor, dist.Work, int] | None = None
        self._named = self._seen = -1
        self._since_s = time.perf_counter()
        self._waited_s = 0.0
        self._busy_before_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._compute_s = self._wait_s = self._divergence = 0.0
        self._busy_before_s = self._averager.busy_s

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count the time inside as waiting for others."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - start_s

    @property
    def waited_s(self) -> float:
        """Waiting in the step that is being made."""
        return self._waited_s

    def diverged(self, distance: float) -> None:
        """This worker was so far from the average, squared, of some layers."""
        self._divergence += distance

    def stepped(self) -> None:
        end_s = time.perf_counter()
        self._compute_s += end_s - self._since_s - self._waited_s
        self._wait_s += self._waited_s
        self._steps += 1
        self._since_s, self._waited_s = end_s, 0.0

    def period_ended(self, steps: int) -> PeriodReport | None:
        """Tell the others of this period, and return what all told of the one before; None the first time."""
        report = self._read()
        own = [
            self._compute_s / self._steps,
            self._wait_s / self._steps,
            self._divergence,
            self._averager.busy_s - self._busy_before_s,
        ]
        group = self._averager.group
        table = torch.zeros(len(self.workers), len(own), dtype=torch.float64)
        table[dist.get_rank(group)] = torch.tensor(own, dtype=torch.float64)
        table = table.to(message_device(group))
        work = dist.all_reduce(table, group=group, async_op=True)
        assert work is not None
        self._averager.watch(work)
        self._on_the_way = (table, work, steps)
        self._clear()
        return report

    def restart(self) -> None:
        """Leave out the time since the last step: it was spent on something else."""
        self._since_s = time.perf_counter()

    def flush(self) -> None:
        """Read what is on the way, before the group is used no more."""
        self._read()

    def _read(self) -> PeriodReport | None:
        if self._on_the_way is None:
            return None
        table, work, steps = self._on_the_way
        work.wait()
        self._on_the_way = None
        compute_s, wait_s, divergence, busy_s = (column.tolist() for column in table.unbind(1))
        self.last = PeriodReport(
            steps=steps,
            compute_s=tuple(compute_s),
            wait_s=tuple(wait_s),
            divergence=statistics.fmean(divergence),
            link_busy_s=min(busy_s),
        )
        self._name_slowest(self.last)
        return self.last

    def _name_slowest(self, report: PeriodReport) -> None:
        usual_s, most_s = report.usual_s, max(report.compute_s)
        behind = most_s > max(BEHIND * usual_s, usual_s + LEAST_BEHIND_S)
        slowest = report.compute_s.index(most_s) if behind else -1
        again, self._seen = slowest == self._seen, slowest
        if not again:
            return
        if slowest not in (self._named, -1) and dist.get_rank(self._averager.group) == 0:
            LOG.warning(
                "%s computes %.0f ms a step, the others %.0f: every averaging waits for it, %.0f ms a step",
                self.workers[slowest],
                1e3 * most_s,
                1e3 * usual_s,
                1e3 * report.behind_s,
            )
        self._named = slowest


T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """The objects that every mode works on."""

    module: nn.Module
    model: FlatModel  # the module's layers
    updates: Updates
    averager: Averager
    monitor: Monitor
    period: int
    options: Options
    codec: DeltaCodec | None = None  # the codec of the deltas that `outer` and `streaming` exchange

    def delta_averager(self) -> Averager | CompressedAverager:
        """For the same deltas each time."""
        if self.codec is None:
            return self.averager
        return CompressedAverager(self.averager, self.codec, self.options.error_decay)


class Mode:
    """One way to keep the replicas together."""

    in_backward = False  # whether `ready` and `backward_ended` are to be called
    updates_in_backward = False  # whether a change of gradients after the backward pass comes too late
    resets_each_backward = False
    """Whether several backward passes may come before one step, each with all gradients anew."""
    plan: SyncPlan | None = None

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.steps = 0  # how many have been made
        self.periods = 0
        self.own_period = setting.period  # steps of this worker in a period
        self._in_period = 0  # how many of them have been made

    @property
    def finished(self) -> bool:
        """Return whether all workers together have made what was to be made."""
        return False

    @property
    def samples(self) -> int | None:
        """Samples of all workers so far; None where they count nothing but steps."""
        return None

    @property
    def sent_bytes(self) -> int:
        return self.setting.averager.sent_bytes

    def ready(self, number: int) -> None:
        """All gradients of layer `number` are there. Called inside backward."""

    def backward_ended(self) -> None:
        """All gradients are there."""

    def accept_gradients(self) -> None:
        """They count as unchanged since the backward pass."""

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        """Update, average what is due. Returns the closure's loss. The caller counts the step, afterwards."""
        raise NotImplementedError

    def count(self) -> None:
        """A step was made."""
        ends_period = self.ends_period
        self.steps += 1
        self.periods += ends_period
        self._in_period = 0 if ends_period else self._in_period + 1

    def counts(self) -> Tensor:
        """Return the counts that `recount` takes."""
        return torch.tensor([self.steps, self.periods, self.own_period, self._in_period])

    def recount(self, counts: Tensor) -> None:
        """Go on from a saved place."""
        self.steps, self.periods, self.own_period, self._in_period = counts.tolist()

    def stepped(self) -> None:
        """The step is counted."""

    def wait(self) -> None:
        """Until nothing changes the parameters any more before the next step."""

    def detach(self) -> None:
        """Take away what was put on the model."""

    def period_ended(self, report: PeriodReport | None) -> None:
        """All workers are at the end of a period; `report` is what they said of the one before."""

    def state(self) -> dict[str, Tensor]:
        """Return the state that is lost with the process: tensors by name."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`. Raises UserError for one that does not fit."""

    @property
    def ends_period(self) -> bool:
        """Return whether the step that is being made is the last of its period."""
        return self._in_period + 1 == self.own_period

    def average(self, layers: Sequence[Layer]) -> None:
        """Average the parameters of some layers and wait; `Gamma` is noted."""
        measured = MeasuredAverage(self.setting.averager, spans(layers))
        with self.setting.monitor.waiting():
            self.setting.monitor.diverged(measured.wait())


def restored(state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """One tensor of a saved state. Raises UserError unless it is there with the shape of `like`."""
    if name not in state:
        raise UserError(f"saved sync state: {name!r} is missing. Was it saved in this mode?")
    if state[name].shape != like.shape:
        raise UserError(
            f"saved sync state: {name!r}: got shape {tuple(state[name].shape)}, expected {tuple(like.shape)}. Is it "
            "the same model?"
        )
    return state[name].to(like.device, like.dtype)


def restored_document(state: Mapping[str, Tensor], name: str, kind: type[T]) -> T:
    """The value that `exchange.to_bytes` packed under this name. UserError if it is missing or of another kind."""
    if name not in state:
        raise UserError(f"saved sync state: {name!r} is missing. Was it saved in this mode?")
    try:
        return from_bytes(state[name], kind)
    except UserError as error:
        raise UserError(f"saved sync state: {name!r}: {error}: expected what Sync.state_dict() gave") from None


class OuterExchange:
    """The outer step of some tensors. `start` are the outer ones, which are kept and changed in place."""

    def __init__(self, start: Sequence[Tensor], setting: Setting, config: OuterOptimizer) -> None:
        self._monitor = setting.monitor
        self._averager = setting.delta_averager()
        self._outer = OuterStep(start, config)
        self._deltas: list[Tensor] = []
        self._average: MeasuredAverage | None = None

    @torch.no_grad()
    def start(self, own: Sequence[Tensor], *, averaged: bool = False) -> None:
        """Send what was moved since the last outer step; nothing where `own` is the workers' average already."""
        self._deltas = self._outer.deltas(own)
        if not averaged:
            self._average = MeasuredAverage(self._averager, self._deltas)

    def arrive(self) -> None:
        """Wait until the others' are here."""
        if self._average is not None:
            with self._monitor.waiting():
                self._monitor.diverged(self._average.wait())
            self._average = None

    @torch.no_grad()
    def step(self) -> None:
        """Make the outer step with what arrives."""
        self.arrive()
        self._outer.step(self._deltas)
        self._deltas = []

    def mix_into(self, own: Sequence[Tensor]) -> None:
        """Bring a worker's tensors to the outer ones, but for the share that stays."""
        self._outer.mix_into(own)

    def state(self, prefix: str) -> dict[str, Tensor]:
        """Return the state that is lost with the process, by name. Waits for exchanges that are on their way."""
        self.arrive()
        found: dict[str, Tensor] = {}
        for number, (value, momentum) in enumerate(zip(self._outer.values, self._outer.momenta, strict=True)):
            found[f"{prefix}.{number}"] = value
            if momentum is not None:
                found[f"{prefix}.{number}.momentum"] = momentum
        found.update({f"{prefix}.delta.{number}": delta for number, delta in enumerate(self._deltas)})
        errors = self._averager.state(prefix) if isinstance(self._averager, CompressedAverager) else {}
        return {**found, **errors}

    def load(self, state: Mapping[str, Tensor], prefix: str) -> None:
        """Go on from what `state` gave. Raises UserError for tensors that do not fit."""
        own = list(enumerate(self._outer.values))
        momenta = [
            restored(state, name, value) if (name := f"{prefix}.{number}.momentum") in state else None
            for number, value in own
        ]
        self._outer.load([restored(state, f"{prefix}.{number}", value) for number, value in own], momenta)
        if isinstance(self._averager, CompressedAverager):
            self._averager.load(state, prefix)
        self.arrive()
        self._deltas = []
        if f"{prefix}.delta.0" in state:
            self._deltas = [restored(state, f"{prefix}.delta.{number}", value).clone() for number, value in own]


class Fragment:
    """Some layers and their exchange."""

    def __init__(self, layers: Sequence[Layer], setting: Setting, outer: OuterOptimizer) -> None:
        self._flats = [flat for layer in layers for flat in layer.flats]
        self.exchange = OuterExchange(pack(self._flats).flats, setting, outer)

    def start(self) -> None:
        self.exchange.start(pack(self._flats).flats)

    @torch.no_grad()
    def apply(self) -> None:
        """Make the outer step, and mix its result into the model."""
        self.exchange.step()
        packed = pack(self._flats)
        self.exchange.mix_into(packed.flats)
        packed.copy_to(self._flats)


class Streaming(Mode):
    """Starts one fragment's exchange at a time, and applies it `delay` steps later."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        options, layers = setting.options, setting.model.layers
        if options.delay >= setting.period > 1 or (setting.period == 1 and options.delay > 1):
            raise UserError(
                f"sync option 'delay': got {options.delay}, expected less than the period of {setting.period}"
            )
        self._schedule = FragmentSchedule.streaming(
            layers=len(layers), period=setting.period, fragments=options.fragments, delay=options.delay
        )
        held: list[list[Layer]] = [[] for _ in range(self._schedule.count)]
        for number, layer in enumerate(layers):
            held[self._schedule.fragment_of(number)].append(layer)
        outer = OuterOptimizer(
            rate=options.outer_rate, momentum=options.outer_momentum, delay=options.delay, mixing=options.mixing
        )
        self._fragments = [Fragment(members, setting, outer) for members in held]

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        loss = self.setting.updates.whole(closure, scaler)
        for kind, number in self._schedule.events(self.steps):
            if kind == "start":
                self._fragments[number].start()
            else:
                self._fragments[number].apply()
        return loss

    def detach(self) -> None:
        """Wait for exchanges that are on their way: torch ends a process whose group goes away under one."""
        for fragment in self._fragments:
            fragment.exchange.arrive()

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, fragment in enumerate(self._fragments):
            found.update(fragment.exchange.state(f"fragment.{number}"))
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        for number, fragment in enumerate(self._fragments):
            fragment.exchange.load(state, f"fragment.{number}")


BALANCED_OVER = 5  # periods whose median says how fast a worker is: one alone may have been disturbed


def balanced_steps(period: int, compute_s: Sequence[float]) -> tuple[int, ...]:
    """Steps of each worker, given what one step takes it: about as many together as `period` each, none below 1.

    The sum over the workers of H_k is K H to rounding, so that a period sees the same number of samples.
    """
    speeds = [1 / max(taken_s, 1e-9) for taken_s in compute_s]
    share = period * len(speeds) / sum(speeds)
    return tuple(max(1, round(share * speed)) for speed in speeds)


class LocalSteps(Mode):
    """A mode whose workers meet only at the end of a period, after steps of their own number."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._balanced: list[int] = []
        self._compute_s: deque[tuple[float, ...]] = deque(maxlen=BALANCED_OVER)

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        s = self.setting
        if s.options.average_state:
            s.updates.check_to_average(s.model.layers, closure, scaler)
        averaged = s.options.average_state and self.ends_period
        if averaged:
            with s.monitor.waiting():
                average_with_state(s.averager, s.updates, s.model.layers)
        loss = s.updates.whole(closure, scaler)
        if self.ends_period:
            self.meet(averaged=averaged)
        return loss

    def meet(self, *, averaged: bool) -> None:
        """The last step of a period is made. `averaged`: the workers' parameters are equal already."""
        raise NotImplementedError

    def period_ended(self, report: PeriodReport | None) -> None:
        if not self.setting.options.balance or report is None:
            return
        self._compute_s.append(report.compute_s)
        usual_s = [statistics.median(of_worker) for of_worker in zip(*self._compute_s, strict=True)]
        self._balance(balanced_steps(self.setting.period, usual_s))

    def _balance(self, steps: Sequence[int]) -> None:
        self._balanced = list(steps)
        self.own_period = steps[dist.get_rank(self.setting.averager.group)]
        self.setting.averager.count_steps(steps)

    def state(self) -> dict[str, Tensor]:
        return {"balanced": torch.tensor(self._balanced)} if self._balanced else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        if "balanced" in state:
            self._balance(state["balanced"].tolist())


class LocalSGD(LocalSteps):
    """The whole model is averaged after the last step of each period, in the open."""

    def meet(self, *, averaged: bool) -> None:
        if not averaged:
            self.average(self.setting.model.layers)


class DiLoCo(LocalSteps):
    """After the last step of each period comes an outer step, on one flat tensor per dtype and device."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        outer = OuterOptimizer(rate=setting.options.outer_rate, momentum=setting.options.outer_momentum)
        self._exchange = OuterExchange([buffer.clone() for buffer in setting.model.buffers], setting, outer)

    def meet(self, *, averaged: bool) -> None:
        own = self.setting.model.buffers
        self._exchange.start(own, averaged=averaged)
        self._exchange.step()
        self._exchange.mix_into(own)

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **self._exchange.state("outer")}

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        self._exchange.load(state, "outer")
