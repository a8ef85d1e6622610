"""Replicas that never wait (Decoupled DiLoCo, arXiv 2604.21428): every worker trains at its own speed. A process that
worker 0 starts merges their changes.

Workers and merger speak over connections of their own. Once `attach` has returned, nothing goes through
torch.distributed: there a worker that is gone would hold up the others.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence

import msgspec
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.combinations import refused
from isthmus.errors import IsthmusError, UserError
from isthmus.protocol.decoupled_events import MergeRules
from isthmus.protocol.run_messages import DeviceFailed
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaHost, ReplicaPlace
from isthmus.runtime.decoupled.merger_process import MergerProcess, MergerSpec
from isthmus.sync.exchange import broadcast, gather
from isthmus.sync.exit_cleanup import TIMEOUT_S, closed, opened
from isthmus.sync.mode import LOG, Mode, Setting
from isthmus.sync.updates import Closure
from isthmus.training.decoupled import ReplicaFragments, check_model, delta_codec, flat_fragments, fragments_of

JOIN_S = 1.0  # for the merger to end after the run


class _Address(msgspec.Struct, frozen=True, kw_only=True):
    """The address of the merger, as worker 0 sends it."""

    run: str = ""
    address: str = ""
    error: str = ""


class DecoupledMode(Mode):
    """Fragments in turn, each merged once in a period of all workers' samples."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.own_period = 0  # workers meet at no step
        check_model(setting.module)
        options, group = setting.options, setting.averager.group
        rules = options.decoupled
        self._fragments = ReplicaFragments(fragments_of(setting.module, rules.fragments), delta_codec(rules))
        samples = gather(int(options.weight), int, group)
        rank, together = dist.get_rank(group), sum(samples)
        self._samples = samples[rank]
        self._total = options.steps * together or None
        self._merger: MergerProcess | None = None
        place = self._place(samples, rank)
        self._replica = ReplicaHost(self._fragments, together, MergerLink(place))
        opened(self)
        self._replica.receive(options.timeout_s)
        error = "" if self._replica.phase == "training" else f"cannot reach the merger at {place.address}"
        for number, failed in enumerate(gather(error, str, group)):
            if failed:
                self.leave(0.0)
                if self._merger is not None:
                    self._merger.kill()
                raise UserError(f"{setting.monitor.workers[number]}: {failed}, which is worker 0 by its MASTER_ADDR")

    def _place(self, samples: Sequence[int], rank: int) -> ReplicaPlace:
        """Start the merger on worker 0, whose address all workers get. `samples` are of a step of each worker."""
        setting, own, together = self.setting, None, sum(samples)
        options, group = setting.options, setting.averager.group
        names = tuple(f"worker {number}" for number in range(setting.averager.workers))
        if rank == 0:
            spec = MergerSpec(
                run=secrets.token_hex(16),
                host=os.environ.get("MASTER_ADDR", "127.0.0.1"),
                replicas=names,
                rules=MergeRules(
                    samples=self._total,
                    merge_every=setting.period * together / options.decoupled.fragments,
                    fragments=options.decoupled.fragments,
                    quorum=options.decoupled.quorum,
                    grace=options.decoupled.grace,
                    timeout_s=options.timeout_s,
                    step_samples=max(samples),
                ),
                decoupled=options.decoupled,
                record=options.record,
            )
            try:
                self._merger = MergerProcess(spec, flat_fragments(setting.module, options.decoupled.fragments))
                own = _Address(run=spec.run, address=self._merger.address())
            except (IsthmusError, OSError) as e:
                own = _Address(error=str(e))
        found = broadcast(own, _Address, group)
        if found.error:
            raise UserError(found.error)
        return ReplicaPlace(name=names[rank], run=found.run, address=found.address, timeout_s=options.timeout_s)

    @property
    def finished(self) -> bool:
        replica = self._replica
        if replica.phase != "training":
            return True
        enough = self._total is not None and replica.samples >= self._total
        return enough and replica.unreachable_s > self.setting.options.timeout_s

    @property
    def samples(self) -> int:
        return self._replica.samples

    @property
    def sent_bytes(self) -> int:
        return self._replica.sent_bytes

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        if self.finished:
            raise UserError("sync.step(): the run is over: expected `while not sync.finished`, then sync.close()")
        loss = self.setting.updates.whole(closure, scaler)
        self._fragments.account.trained(self._samples)
        self._replica.stepped(self._samples)
        return loss

    def detach(self) -> None:
        """Wait for the last step of all workers and take what is merged. Never waits after an error."""
        if sys.exception() is not None:
            self.leave(TIMEOUT_S)
            return
        try:
            self._replica.last_step_made()
            self._replica.receive(self.setting.options.timeout_s)
            if self._replica.halted:
                self._fragments.settle()
            else:
                LOG.warning("the merger cannot be reached: this worker keeps its own model")
        finally:
            self._end(TIMEOUT_S)
        if self._merger is not None:
            self._merger.join(JOIN_S)

    def leave(self, timeout_s: float) -> None:
        """Hang up in the middle of the run."""
        self._replica.link.put(DeviceFailed(reason="its script has ended", fault="user"))
        self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        closed(self)
        self._replica.link.close(timeout_s)

    def state(self) -> dict[str, Tensor]:
        raise refused("a saved state", "decoupled scripts", "it")

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.state()
