"""A real run of which one replica is stopped for a minute (SIGSTOP): what that costs the others."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from jobs import job_of
from tests.decoupled.small import pid_of, replicas_of

from isthmus.cost import SyncPolicy
from isthmus.data import DataSpec, load_dataset
from isthmus.fleet import resolve_fleet
from isthmus.job import RuntimeConfig, TrainingConfig
from isthmus.models import ModelSpec
from isthmus.protocol.decoupled_events import MergeChanges
from isthmus.runtime.coordinator.backend import LocalBackend
from isthmus.runtime.decoupled.merger import MergerWatch
from isthmus.runtime.decoupled.run import DecoupledRun
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.processes.signals import Stop
from isthmus_testing.decoupled_replay import replay

BEFORE_S, STOPPED_S, AFTER_S = 60.0, 60.0, 20.0
STEP_S = {"fast-0": 0.25, "middle-0": 0.5, "slow-0": 1.0, "slow-1": 1.0}
"""So long that this machine's other work matters little."""


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    replica: str
    """That was stopped."""
    before: dict[str, float]
    """Steps of each replica per second, from when all had begun."""
    meanwhile: dict[str, float]
    merges_before: int
    merges_meanwhile: int
    longest_merge_s: float
    """Longest time between two merges since it was stopped."""
    back_after_s: float
    """From its going on until its contribution was merged."""
    same_bits: bool
    """Whether a replay of the record gives the run's model."""

    @property
    def cost(self) -> float:
        """Share of the others' steps."""
        others = [name for name in self.before if name != self.replica]
        return 1 - sum(self.meanwhile[n] for n in others) / sum(self.before[n] for n in others)


def stopped(replica: str) -> Stopped:
    job = job_of("decoupled")
    whole_s = BEFORE_S + STOPPED_S + AFTER_S
    training = TrainingConfig(steps=round(whole_s / 0.5), batch_size=32, micro_batches=8)
    job = msgspec.structs.replace(
        job, model=ModelSpec(name="mlp"), data=DataSpec(kind="digits"), training=training, sync=_rules(job.sync)
    )
    job = msgspec.structs.replace(job, runtime=RuntimeConfig(emulate=False))  # the time of steps is given
    fleet = resolve_fleet(job.fleet)
    made, merges = list[tuple[float, str]](), list[tuple[float, MergeChanges]]()
    watch = MergerWatch(
        stepped=lambda name, _, __, seconds: made.append((seconds, name)),
        merged=lambda merge, seconds: merges.append((seconds, merge)),
        note=print,
    )
    stop = Stop()
    backend = LocalBackend(places={name: ProcessPlace(step_s=step_s) for name, step_s in STEP_S.items()})
    with tempfile.TemporaryDirectory() as folder:
        run = DecoupledRun(replicas_of(job, fleet, backend), Path(folder))

        def act() -> None:
            time.sleep(BEFORE_S)
            pid = pid_of(replica)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(AFTER_S)
            stop.request()

        threading.Thread(target=act, daemon=True).start()
        run.run(watch, stop)
        again = replay(job, load_dataset(job.data, "train"), fleet.names, [merge for _, merge in merges])
        same = all(torch.equal(a, b) for a, b in zip(again.known, run.merged.known, strict=True))
    begun_s = max(min(s for s, n in made if n == name) for name in STEP_S) + 1
    since_s, until_s = BEFORE_S, BEFORE_S + STOPPED_S
    times = [seconds for seconds, _ in merges if since_s - 5 <= seconds]
    back = [
        s for s, m in merges if s > until_s and any(c.replica == replica for f in m.fragments for c in f.contributions)
    ]
    return Stopped(
        replica=replica,
        before=_steps(made, begun_s, since_s),
        meanwhile=_steps(made, since_s, until_s),
        merges_before=sum(begun_s <= s < since_s for s, _ in merges),
        merges_meanwhile=sum(since_s <= s < until_s for s, _ in merges),
        longest_merge_s=max(b - a for a, b in pairwise(times)),
        back_after_s=back[0] - until_s,
        same_bits=same,
    )


def _rules(sync: SyncPolicy) -> SyncPolicy:
    return msgspec.structs.replace(sync, decoupled=msgspec.structs.replace(sync.decoupled, fragments=2))


def _steps(made: list[tuple[float, str]], begin_s: float, end_s: float) -> dict[str, float]:
    """By replica, per second."""
    return {name: sum(n == name and begin_s <= s < end_s for s, n in made) / (end_s - begin_s) for name in STEP_S}


if __name__ == "__main__":
    found = stopped("fast-0")
    print(found, f"cost {100 * found.cost:.2f} %")
