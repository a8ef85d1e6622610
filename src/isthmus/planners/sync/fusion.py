"""Which layers' gradients travel in one message, where several messages may be on their way at once.

    backward    |--4--|--3--|--2--|--1--|
    one         l4444        l333222      l1        l: a message's latency, in which the channel carries nothing of it
    two         l4444333332222211           the second's latency runs while the first one's bytes do

ASC-WFBP (Shi, Chu and Li, INFOCOM 2021) merges tensors and lets several all-reduces share the links, whichever is
soonest through. A message occupies the channel for its bytes alone here, and no more than `at_once` are begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.errors import UserError


@dataclass(frozen=True)
class Fusion:
    """Messages in the order in which they leave, each a run of layers by number in backward order."""

    messages: tuple[range, ...]
    through_s: float  # when the last of them is there, on the clock of `ready_s`


def fused(ready_s: Sequence[float], wire_s: Sequence[float], latency_s: float, at_once: int) -> Fusion:
    """The messages that are soonest through. O(L^2) per number of messages at once.

    `ready_s`: when each layer's gradients are complete, which never falls; `wire_s`: how long its bytes take, latency
    left out. Exact for one message at a time, whose end alone counts for what follows (MG-WFBP's problem). For several
    the earliest end of each prefix is kept, so that is a heuristic; the best of 1 to `at_once` is taken.

    Raises UserError for no layers, or fewer than one message at once.
    """
    if not ready_s or len(ready_s) != len(wire_s):
        raise UserError(f"layers: got {len(ready_s)} and {len(wire_s)} times, expected as many, at least one")
    if at_once < 1:
        raise UserError(f"at_once: got {at_once}, expected at least 1")
    found = [_fused(ready_s, wire_s, latency_s, count) for count in range(1, min(at_once, len(ready_s)) + 1)]
    return min(found, key=lambda fusion: (fusion.through_s, len(fusion.messages)))


def by_size(sizes_bytes: Sequence[int], least_bytes: int) -> tuple[range, ...]:
    """Messages of at least so many bytes, but for the last; `sizes_bytes` of the layers in backward order."""
    found: list[range] = []
    start = held_bytes = 0
    for layer, size_bytes in enumerate(sizes_bytes):
        held_bytes += size_bytes
        if held_bytes >= least_bytes or layer == len(sizes_bytes) - 1:
            found.append(range(start, layer + 1))
            start, held_bytes = layer + 1, 0
    return tuple(found)


def sent(ended_s: tuple[float, ...], ready_s: float, wire_s: float, latency_s: float, at_once: int) -> float:
    """Return when one more message is through, given when those before it were."""
    begins_s = max(ready_s, ended_s[-at_once] if len(ended_s) >= at_once else 0.0)
    return max(begins_s + latency_s, ended_s[-1] if ended_s else 0.0) + wire_s


def _fused(ready_s: Sequence[float], wire_s: Sequence[float], latency_s: float, at_once: int) -> Fusion:
    # Of the first layers: when the last `at_once` messages ended, in order; and all messages.
    best: list[tuple[tuple[float, ...], tuple[range, ...]]] = [((), ())]
    for end in range(1, len(ready_s) + 1):
        carried_s = 0.0
        choices: list[tuple[tuple[float, ...], tuple[range, ...]]] = []
        for start in reversed(range(end)):
            carried_s += wire_s[start]
            ended_s, messages = best[start]
            through_s = sent(ended_s, ready_s[end - 1], carried_s, latency_s, at_once)
            choices.append(((*ended_s, through_s)[-at_once:], (*messages, range(start, end))))
        best.append(min(choices, key=lambda choice: (choice[0][::-1], len(choice[1]))))
    ended_s, messages = best[-1]
    return Fusion(messages, ended_s[-1])
