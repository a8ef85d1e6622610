"""Plans, fleets and traces for the tests of the report: a pipeline played on a heap of events, in eighty lines.

It follows the order policy of schedules (backward first, then the lowest micro-batch) and lets each link carry
one message at a time, but it is no simulator: stages form a chain, and an update takes the time of one forward.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Literal

from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus.plans import Certificate, Edge, Plan, Prediction, Replica, Schedule, Stage, StageMemory, classic_in_flight
from isthmus.trace import Span, Trace, Track

MIB = 1024**2


def make_fleet(devices: int) -> Fleet:
    """Two regions of unequal devices, 20 ms and 100 Mbit/s apart, 0.5 ms and 1 Gbit/s inside."""
    places = ["lisbon", "oslo"]
    return Fleet(
        name="two-cities",
        description="a fleet for tests",
        devices=tuple(
            Device(
                name=f"{places[2 * i // devices]}-{i}",
                region=places[2 * i // devices],
                flops_per_s=(10 + 5 * (i % 3)) * 1e9,
                memory_bytes=2 * 1024 * MIB,
            )
            for i in range(devices)
        ),
        links=Links(
            intra=Link(0.0005, 125e6),
            regions=(Route("lisbon", "oslo", Link(0.02, 12.5e6)), Route("oslo", "lisbon", Link(0.025, 12.5e6))),
        ),
    )


def make_plan(fleet: Fleet, micro_batches: int = 8) -> Plan:
    """A chain over all devices, each with work for about 90 ms per micro-batch."""
    count = len(fleet.devices)
    stages = tuple(
        Stage(
            device=device.name,
            first=10 * i,
            last=10 * i + 9,
            first_op=f"linear_{i}",
            last_op=f"gelu_{i}",
            flops_forward=int(device.flops_per_s * 0.03),
            flops_backward=int(device.flops_per_s * 0.06),
            parameter_bytes=4_000_000,
            memory=StageMemory(weights=4 * MIB, gradients=4 * MIB, optimizer=8 * MIB, activations=100 * MIB),
        )
        for i, device in enumerate(fleet.devices)
    )
    edges = tuple(
        Edge(
            source=i, target=i + 1, values=("gelu",), gradients=("gelu",), forward_bytes=500_000, backward_bytes=500_000
        )
        for i in range(count - 1)
    )
    return Plan(
        model="gpt-test",
        fleet=fleet.name,
        planner="dp",
        micro_batch_size=4,
        micro_batches=micro_batches,
        replicas=(
            Replica(
                stages=stages,
                edges=edges,
                micro_batches=micro_batches,
                schedule=Schedule("1f1b", classic_in_flight("1f1b", count, micro_batches)),
            ),
        ),
        predicted=Prediction(
            step_s=1.13, micro_batches=8, period_s=0.09, fill_s=0.5, eq3_step_s=1.5, bottleneck="device oslo-2"
        ),
        certificate=Certificate(lower_bound=1.2, gap=1 / 24, question="contiguous partitions"),
        notes=("lisbon-0 holds the embedding.",),
    )


def play(
    plan: Plan,
    fleet: Fleet,
    *,
    steps: int = 4,
    jitter: float = 0.0,
    eval_after: int = -1,
    source: Literal["simulator", "runtime"] = "simulator",
) -> Trace:
    """The spans of `steps` training steps; with `jitter`, every duration is drawn up to that fraction longer."""
    return _Pipeline(plan, fleet, jitter).run(steps, eval_after, source)


class _Pipeline:
    def __init__(self, plan: Plan, fleet: Fleet, jitter: float) -> None:
        self.plan, self.fleet, self.jitter = plan, fleet, jitter
        self.names = [stage.device for stage in plan.stages]
        self.last = len(self.names) - 1
        self.random = random.Random(0)
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = itertools.count()
        self.link_free: dict[tuple[int, int], float] = {}

    def run(self, steps: int, eval_after: int, source: Literal["simulator", "runtime"]) -> Trace:
        self.items = [item for s in range(steps) for item in ([("train", s)] + [("eval", s + 1)] * (s == eval_after))]
        self.arrived: set[tuple[str, int, int, int]] = set()
        self.at = [0] * len(self.names)  # each stage's item
        self.forwards = [0] * len(self.names)
        self.waiting: list[list[int]] = [[] for _ in self.names]
        self.done = [0] * len(self.names)
        self.busy = [False] * len(self.names)
        for s in range(len(self.names)):
            self._later(0.0, lambda now, s=s: self._pick(s, now))
        while self.events:
            now, _, action = heapq.heappop(self.events)
            action(now)
        return Trace(source=source, run="test", spans=tuple(self.spans))

    def _later(self, time_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), action))

    def _pick(self, s: int, now: float) -> None:
        if self.busy[s] or self.at[s] == len(self.items):
            return
        kind, _ = self.items[self.at[s]]
        n, item, f = self.plan.micro_batches, self.at[s], self.forwards[s]
        ready = [m for m in self.waiting[s] if s == self.last or ("B", s, item, m) in self.arrived]
        if self.done[s] == n:
            self._compute(s, "update" if kind == "train" else "norm", -1, now)
        elif ready:
            self.waiting[s].remove(min(ready))
            self._compute(s, "B", min(ready), now)
        elif (
            f < n
            and (s == 0 or ("F", s, item, f) in self.arrived)
            and (len(self.waiting[s]) < self.plan.replica.schedule.in_flight[s])
        ):
            self.forwards[s] += 1
            self._compute(s, "F" if kind == "train" else "E", f, now)

    def _compute(self, s: int, work: str, m: int, now: float) -> None:
        stage, speed = self.plan.stages[s], self.fleet.device(self.names[s]).flops_per_s
        flops = {"B": stage.flops_backward, "norm": 0}.get(work, stage.flops_forward)
        end = now + flops / speed * (1 + self.jitter * self.random.random())
        self._span(s, "compute", work, now, end, m)
        self.busy[s] = True
        self._later(end, lambda now: self._computed(s, work, m, now))

    def _computed(self, s: int, work: str, m: int, now: float) -> None:
        self.busy[s] = False
        if work in ("F", "E") and s < self.last:
            self._send(s, s + 1, "F", m, now)
        if work == "B" and s > 0:
            self._send(s, s - 1, "B", m, now)
        if work == "F":
            self.waiting[s].append(m)
        elif m >= 0:
            self.done[s] += 1
        else:
            self.at[s] += 1
            self.forwards[s] = self.done[s] = 0
        self._pick(s, now)

    def _send(self, s: int, t: int, kind: str, m: int, now: float) -> None:
        link, size = self.fleet.link(self.names[s], self.names[t]), 500_000
        start = max(now, self.link_free.get((s, t), 0.0))
        end = start + size / link.bandwidth_bytes_per_s * (1 + self.jitter * self.random.random())
        self.link_free[s, t] = end
        name = "forward" if kind == "F" else "backward"
        self._span(s, "send", name, start, end, m, t)
        self._span(t, "receive", name, start + link.latency_s, end + link.latency_s, m, s, self.at[s])
        key = (kind, t, self.at[s], m)

        def arrive(now: float) -> None:
            self.arrived.add(key)
            self._pick(t, now)

        self._later(end + link.latency_s, arrive)

    def _span(
        self, s: int, track: Track, name: str, start: float, end: float, m: int, other: int = -1, item: int = -1
    ) -> None:
        step = self.items[self.at[s] if item < 0 else item][1]
        size = 500_000 if other >= 0 else 0
        self.spans.append(
            Span(
                device=self.names[s],
                track=track,
                name=name,
                start_s=start,
                end_s=end,
                step=step,
                micro_batch=m,
                size_bytes=size,
                wire_bytes=size and size + 64,
                other=self.names[other] if other >= 0 else "",
            )
        )
