"""A stage accepts, while a plan is in force, only the items that its coordinator opens and the data that its neighbours
send for them. Anything else is refused before it is kept.

Why a neighbour is never far ahead: an item is opened when all devices have reported the one that lies `lease_ahead`
before it, and one item more at the run's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from isthmus.errors import PeerError
from isthmus.protocol.run_messages import Arrived, Item, PartsArrived, Share
from isthmus.protocol.worker import StageView

Key = tuple[str | int, ...]


class StageArrivals:
    """Checks the arrivals of one stage in one plan epoch. A neighbour's error names its device, any other the
    coordinator."""

    def __init__(
        self,
        view: StageView,
        share: Share,
        names: Mapping[int, str],
        *,
        start_step: int = 0,
        first_item: int = 0,
        lease_ahead: int = 3,
        eval_micro_batches: int = 0,
        eval_rest: int = 0,
    ) -> None:
        """`names` are the devices of other stages, by the stages' numbers."""
        self._view, self._share, self._names = view, share, names
        self._ahead = lease_ahead
        self._eval_micro_batches, self._eval_rest = eval_micro_batches, eval_rest
        self._step = start_step  # the step of the training item that is opened next
        self._kept_step = -1  # the step of the newest snapshot
        self._opens = self._reports = first_item  # the item that is opened next, and the one that is reported next
        self._first = first_item  # arrivals for items before this one come too late and are refused
        self._parts: dict[int, Item] = {}
        """The part of each opened item that this stage's replica does, by the item's index."""
        self._seen: dict[int, dict[Key, Arrived | PartsArrived]] = {}
        self._trained: deque[int] = deque(maxlen=view.delay + 1)
        self._receives = {
            (group.group, number, message.other): group.iterations
            for group in view.groups
            for number, turn in enumerate(group.rounds)
            for message in turn.receives
        }

    def opened(self, item: Item) -> Item:
        """Before the stage takes it: its replica's part of the item."""
        of, size = self._share.of, self._share.micro_batch_size
        first, most = {"train": (self._step * of * size, of)}.get(item.kind, (0, 0))
        if item.kind == "eval":
            number, whole = item.first_sample // max(1, size), self._eval_micro_batches
            first, most = number - number % max(1, of), of
            if self._eval_rest and whole <= number < whole + 2:
                first, whole, most = number, number + 1, 1
            first, most = first * size, min(most, whole - first)
        expected = Item(
            index=self._opens,
            kind=item.kind,
            step=self._step,
            first_sample=first,
            micro_batches=max(0, most),
            to_store=item.to_store and item.kind == "save",
        )
        if item != expected:
            raise PeerError(f"coordinator: opened {_told(item)}, expected {_told(expected)}")
        self._opens += 1
        self._step += item.kind == "train"
        self._kept_step = item.step if item.kind == "keep" else self._kept_step
        self._parts[item.index] = self._share.part(item)
        for body in self._seen.get(item.index, {}).values():
            self._check(body, self._parts[item.index])
        return self._parts[item.index]

    def reported(self, index: int) -> None:
        """The stage has done the item."""
        self._reports = index + 1
        if self._parts[index].kind == "train":
            self._trained.append(index)
        self._first = self._trained[0] if len(self._trained) == self._trained.maxlen else self._first
        for known in (self._parts, self._seen):
            for old in [number for number in known if number < self._first]:
                del known[old]

    def arrived(self, body: Arrived | PartsArrived) -> None:
        """Before it is kept."""
        newest = self._reports + self._ahead
        if not self._first <= body.item <= newest:
            raise self._refused(body, f"expected items {self._first} to {newest}")
        self._check(body, self._parts.get(body.item))
        seen = self._seen.setdefault(body.item, {})
        if (key := _key(body)) in seen:
            raise self._refused(body, "which was here before")
        seen[key] = body

    def copied(self, source: int, step: int) -> None:
        """Before a copy of another stage's snapshot is received: it is of the newest that was opened, or of one that is
        opened soon."""
        newest = self._step + self._ahead
        if step != self._kept_step and not max(self._kept_step, 0) <= step <= newest:
            name = self._names.get(source, "")
            raise PeerError(f"device {name!r}: sent a snapshot of step {step}, expected {self._kept_step} to {newest}")

    def _check(self, body: Arrived | PartsArrived, part: Item | None) -> None:
        """`part` is that of its item, None where the item is not opened yet."""
        view, source = self._view, body.source
        kind = part.kind if part is not None else "train"
        if isinstance(body, PartsArrived):
            iterations = self._receives.get((body.group, body.round, source), ())
            if kind != "train" or (part is not None and part.step % view.period not in iterations) or not iterations:
                raise self._refused(body, "not in the plan")
            return
        sources = {
            "forward": view.eval_from if kind == "eval" else view.forward_from,
            "backward": view.backward_from,
            "shared": view.parameter_owners,
            "shared_gradient": view.parameter_users,
            "count": view.others if view.counts else (),
            "norms": view.others if view.agrees else (),
        }[body.parcel]
        each = body.parcel in ("forward", "backward")
        micro_batches = part.micro_batches if part is not None else self._share.count
        if each and part is not None and 0 <= body.micro_batch < micro_batches:
            sources = view.of(sources, part, body.micro_batch)
        elif part is None and body.parcel == "forward":
            sources = (*sources, *view.eval_from)
        in_range = 0 <= body.micro_batch < micro_batches if each else body.micro_batch == -1
        of_kind = kind == "train" or (kind == "eval" and body.parcel in ("forward", "shared"))
        if not (of_kind and in_range and source in sources):
            raise self._refused(body, f"not in the plan of {micro_batches} micro-batches")

    def _refused(self, body: Arrived | PartsArrived, why: str) -> PeerError:
        if isinstance(body, Arrived):
            what = f"{body.parcel} of micro-batch {body.micro_batch} of item {body.item}"
        else:
            what = f"parts of group {body.group} in round {body.round} of item {body.item}"
        return PeerError(f"device {self._names.get(body.source, '')!r}: sent {what}, {why}")


def _key(body: Arrived | PartsArrived) -> Key:
    if isinstance(body, Arrived):
        return body.parcel, body.source, body.micro_batch
    return "average", body.source, body.group, body.round


def _told(item: Item) -> str:
    samples = f", {item.micro_batches} micro-batches from sample {item.first_sample} on" if item.micro_batches else ""
    return f"item {item.index}: {item.kind} of step {item.step}{samples}"
