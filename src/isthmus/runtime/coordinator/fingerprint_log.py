"""Fingerprints of a run's steps, in its folder: a line when a plan comes into force, and one per worker and step.

A plan that begins after so many steps voids what was said of later ones: they are done again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from isthmus.job import Job
from isthmus.plans import Plan
from isthmus.protocol.fingerprints import INPUTS, STATE, Node, StepFingerprint
from isthmus.run_files import FINGERPRINTS, LinesFile
from isthmus.runtime.messages.assignment import Fingerprinting
from isthmus.training.digests import KEY_BYTES


class FingerprintLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A plan, or a worker's report."""

    step: int  # steps that are done: before the plan, or with what is reported
    plan: Plan | None = None
    key: bytes = b""  # the key of the digests under this plan
    accelerators: dict[str, str] = {}  # where devices of this machine compute under this plan, if not on the CPU
    worker: str = ""
    digests: dict[str, str] = {}


class Fingerprinted(msgspec.Struct, frozen=True, kw_only=True):
    plan: Plan
    key: bytes
    accelerators: dict[str, str]  # accelerators by device; devices that are not here compute on CPUs
    workers: dict[str, dict[str, str]]  # the digests of each worker


class FingerprintLog:
    def __init__(
        self,
        folder: Path,
        settings: Fingerprinting | None,
        steps: int,
        accelerators: Mapping[str, str] = {},
        *,
        leaves: int = 0,
    ) -> None:
        """None: nothing is kept. `steps`: of the run. `accelerators`: where devices compute, if not on the CPU.
        `leaves`: which one device can report of a step of an audit at most, beside the plan's nodes."""
        self.settings = settings
        self._accelerators = dict(accelerators)
        self._steps = steps
        self._leaves = leaves
        self._file = _file(folder)
        self._workers = 0
        self._last: dict[str, tuple[int, bool]] = {}
        """The step that each worker reported last, and whether with a state."""

    def begin(self, step: int, plan: Plan) -> None:
        self._workers, self._last = len(plan.worker_ids), {}
        if self.settings is not None:
            self._file.add(
                FingerprintLine(step=step, plan=plan, key=self.settings.key, accelerators=self._accelerators)
            )

    def add(self, worker: str, found: Sequence[StepFingerprint]) -> None:
        """Write the reports that are valid. Others are ignored: steps out of order, nodes that the plan has not, and
        other names of those that it has."""
        for one in found if self.settings is not None else ():
            kept = {name: digest for name, digest in one.digests.items() if self._knows(name)}
            if len(kept) > self._most:
                continue
            reached = (one.step, any(name.partition("/")[0] == STATE for name in kept))
            if one.step > self._steps or reached <= self._last.get(worker, (0, False)):
                continue
            self._last[worker] = reached
            self._file.add(FingerprintLine(step=one.step, worker=worker, digests=kept))

    @property
    def _most(self) -> int:
        """Names of a step: of each kind one with each stage, sent and received, and in an audit their leaves."""
        assert self.settings is not None, "asked for what is kept"
        return 2 * len(INPUTS) * self._workers + (self._leaves if self.settings.leaves else 0)

    def _knows(self, name: str) -> bool:
        """Return whether this is a node of the plan, so that the plan says how many names a step has. An audit computes
        a few steps, with leaves of nodes and of values that cross the cuts of the plan that is audited."""
        assert self.settings is not None, "asked for what is kept"
        of, slash, _ = name.partition("/")
        node = Node.parse(of)
        if self.settings.leaves and slash:
            return of.partition(" ")[0] in INPUTS or (node is not None and node.name == of)
        return node is not None and node.name == name and node.other < self._workers


def chosen_fingerprints(job: Job) -> Fingerprinting | None:
    wanted = job.runtime.fingerprints or job.runtime.audit > 0
    return Fingerprinting(key=secrets.token_bytes(KEY_BYTES)) if wanted else None


def read_fingerprints(folder: Path) -> dict[int, Fingerprinted]:
    """Return the fingerprints by steps done; none where none were kept."""
    found: dict[int, Fingerprinted] = {}
    plan, key, accelerators = None, b"", dict[str, str]()
    for line in _file(folder).lines():
        if line.plan is not None:
            plan, key, accelerators = line.plan, line.key, line.accelerators
            found = {step: one for step, one in found.items() if step <= line.step}
        elif plan is not None and line.worker in plan.worker_ids:
            new = Fingerprinted(plan=plan, key=key, accelerators=accelerators, workers={})
            one = found.setdefault(line.step, new)
            if one.key == key:  # a checkpoint of the step at which this plan began is of the one before
                one.workers[line.worker] = {**line.digests, **one.workers.get(line.worker, {})}
    return found


def _file(folder: Path) -> LinesFile[FingerprintLine]:
    return LinesFile(folder / FINGERPRINTS, FingerprintLine, "fingerprints")
