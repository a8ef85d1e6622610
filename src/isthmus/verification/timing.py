"""Seconds of a placed pipeline: the closed form and FusionLLM's Eq. 3, for any number of micro-batches. What replicas
sum is in `sums`.

    step = fill + (n - 1) * period + shared parameters + averaging

Under `zero-bubble` nobody waits for weight gradients but their own stage.
Where two steps may be under way (`delayed`) it is n * period, but at least half of what a step takes by itself, from
its first forward to its last backward.

`fill` is one micro-batch alone. `period` is the longest of: a stage's forward and backward; one direction of an edge
without latency; what leaves a site over its shared uplink; a stage's round trip over the micro-batches it may hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from isthmus.verification.cutting import CutGraph
from isthmus.verification.question import Question


class Moved(NamedTuple):
    """Between devices."""

    source: str
    target: str
    size_bytes: float


class StepTiming:
    """A cut graph with stage k on `devices[k]`, which computes its forward twice if `recompute[k]` says so."""

    def __init__(self, question: Question, graph: CutGraph, devices: Sequence[str], recompute: Sequence[bool]) -> None:
        self.graph = graph
        self.devices = tuple(devices)
        speeds = [question.flops_per_s(device) for device in devices]
        self.forward_s = [p.forward_flops / v for p, v in zip(graph.parts, speeds, strict=True)]
        self.backward_s = [
            p.backward_work(again) / v for p, v, again in zip(graph.parts, speeds, recompute, strict=True)
        ]
        self._apart_s = [
            0.0 if again else p.apart_flops / v for p, v, again in zip(graph.parts, speeds, recompute, strict=True)
        ]
        self._fleet = question.fleet
        self._overlaps = question.schedule == "delayed"
        self._next: dict[int, list[tuple[int, float, float]]] = {k: [] for k in range(len(devices))}
        for f in graph.flowing:
            there_s = self._message_s(f.source, f.target, f.forward_bytes)
            back_s = self._message_s(f.target, f.source, f.backward_bytes) if f.backward_bytes else -1.0
            self._next[f.source].append((f.target, there_s, back_s))

    def _message_s(self, source: int, target: int, size_bytes: int) -> float:
        return self.moved_s(self.devices[source], self.devices[target], size_bytes)

    def moved_s(self, source: str, target: str, size_bytes: float) -> float:
        if not size_bytes or source == target:
            return 0.0
        link = self._fleet.link(source, target)
        return link.latency_s + size_bytes / link.bandwidth_bytes_per_s

    @cached_property
    def compute_s(self) -> list[float]:
        return [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]

    @cached_property
    def received_s(self) -> list[float]:
        """Per stage, the messages of every edge that ends there, both ways, one after another."""
        found = [0.0] * len(self.devices)
        for edges in self._next.values():
            for target, there_s, back_s in edges:
                found[target] += there_s + max(back_s, 0.0)
        return found

    @cached_property
    def fill_s(self) -> float:
        before_weights_s = sum(self.compute_s) - sum(self._apart_s) + sum(self.received_s)
        backs = [(k, target, back_s) for k, edges in self._next.items() for target, _, back_s in edges]
        overhang_s = 0.0
        for k, apart_s in enumerate(self._apart_s):
            inputs_s = sum(b - a for b, a in zip(self.backward_s[:k], self._apart_s[:k], strict=True))
            sent_s = sum(max(back_s, 0.0) for _, target, back_s in backs if target <= k)
            overhang_s = max(overhang_s, apart_s - inputs_s - sent_s)
        return before_weights_s + overhang_s

    @cached_property
    def shared_s(self) -> float:
        return sum(self.moved_s(*moved) for moved in self._shared_uses())

    @property
    def used(self) -> frozenset[str]:
        """Devices."""
        return frozenset(self.devices)

    def sent(self, micro_batches: int) -> Iterator[Moved]:
        """Everything that crosses a link in a step, but for what replicas sum."""
        yield from self.flowing(micro_batches)
        yield from self._shared_uses()

    def flowing(self, micro_batches: float) -> Iterator[Moved]:
        for f in self.graph.flowing:
            a, b = self.devices[f.source], self.devices[f.target]
            yield Moved(a, b, micro_batches * f.forward_bytes)
            yield Moved(b, a, micro_batches * f.backward_bytes)

    def _shared_uses(self) -> Iterator[Moved]:
        for p in self.graph.shared_uses:
            for user in p.users:
                yield Moved(self.devices[p.owner], self.devices[user], p.size_bytes)
                yield Moved(self.devices[user], self.devices[p.owner], p.gradient_bytes)

    @cached_property
    def occupied_s(self) -> dict[str, float]:
        """Return how long one micro-batch keeps each device, link and shared uplink busy, by name."""
        found: dict[str, float] = {}
        for name, seconds in zip(self.devices, self.compute_s, strict=True):
            found[f"device {name}"] = found.get(f"device {name}", 0.0) + seconds
        for f in self.graph.flowing:
            for source, target, size in (
                (f.source, f.target, f.forward_bytes),
                (f.target, f.source, f.backward_bytes),
            ):
                a, b = self.devices[source], self.devices[target]
                if a == b:
                    continue
                busy_s = size / self._fleet.link(a, b).bandwidth_bytes_per_s
                found[f"link {a} -> {b}"] = found.get(f"link {a} -> {b}", 0.0) + busy_s
                home, rate = self._uplink(a, b)
                if rate is not None:
                    found[f"uplink of {home}"] = found.get(f"uplink of {home}", 0.0) + size / rate
        return found

    def _uplink(self, source: str, target: str) -> tuple[str, float | None]:
        home, away = self._fleet.device(source).region, self._fleet.device(target).region
        return home, None if home == away else self._fleet.region_info_of(home).uplink_bytes_per_s

    def held_up_s(self, in_flight: Sequence[int], micro_batches: int) -> dict[str, float]:
        """Return the period that a stage's limit imposes where it holds fewer than all micro-batches, by name."""
        found: dict[str, float] = {}
        for k, (name, limit) in enumerate(zip(self.devices, in_flight, strict=True)):
            if limit < self.most_held(micro_batches):
                words = f"memory of device {name} ({limit} micro-batches in flight)"
                found[words] = max(found.get(words, 0.0), self.round_trip_s(k) / limit)
        return found

    def most_held(self, micro_batches: int) -> int:
        """Micro-batches that a stage may hold at all."""
        return 2 * micro_batches if self._overlaps else micro_batches

    def periods_s(self, in_flight: Sequence[int], micro_batches: int) -> dict[str, float]:
        """Everything that could set the period, by name."""
        return {**self.occupied_s, **self.held_up_s(in_flight, micro_batches)}

    @cached_property
    def _round_trips_s(self) -> list[float]:
        return [self.round_trip_s(k) for k in range(len(self.devices))]

    @cached_property
    def _busiest_s(self) -> float:
        return max(self.occupied_s.values())

    def round_trip_s(self, stage: int) -> float:
        """From the start of a micro-batch's forward on a stage to the end of its backward there; nothing else runs."""
        arrived = {stage: 0.0}
        for k in range(stage, len(self.devices)):
            for target, there_s, _ in self._next[k] if k in arrived else ():
                arrived[target] = max(arrived.get(target, 0.0), arrived[k] + self.forward_s[k] + there_s)
        ended: dict[int, float] = {}
        for k in sorted(arrived, reverse=True):
            # A message back of no bytes is not sent, and not waited for.
            ready = [ended[target] + back_s for target, _, back_s in self._next[k] if back_s >= 0]
            ended[k] = max([arrived[k] + self.forward_s[k], *ready]) + self.backward_s[k] - self._apart_s[k]
        return ended[stage] + self._apart_s[stage]

    def step_s(self, in_flight: Sequence[int], micro_batches: int) -> float:
        period_s = self._busiest_s
        for k, limit in enumerate(in_flight):
            if limit < self.most_held(micro_batches):
                period_s = max(period_s, self._round_trips_s[k] / limit)
        if self._overlaps:
            by_itself_s = (micro_batches - 1) * self._busiest_s + max(self._round_trips_s) + self.shared_s
            return max(micro_batches * period_s, by_itself_s / 2)
        return self.fill_s + (micro_batches - 1) * period_s + self.shared_s

    def eq3_s(self, micro_batches: int) -> float:
        """FusionLLM Eq. 3 with the backward: latency counts in the bottleneck, receives follow one another."""
        computing, receiving = dict.fromkeys(self.devices, 0.0), dict.fromkeys(self.devices, 0.0)
        for name, compute_s, received_s in zip(self.devices, self.compute_s, self.received_s, strict=True):
            computing[name] += compute_s
            receiving[name] += received_s
        slowest_s = max(*computing.values(), *receiving.values())
        return sum(self.compute_s) + sum(self.received_s) + (micro_batches - 1) * slowest_s
