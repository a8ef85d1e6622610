"""Fingerprints of a stage's steps, hashed in a thread of its own while the stage goes on.

A tensor on the host must not change before it is read. Clipping, which is in place, waits for that: usually no longer
than for the norms of other stages. So does a checkpoint: the fingerprints of all steps before it are reported with it.
Of a tensor on an accelerator a copy is on its way to the host once it is handed over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from torch import Tensor

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import PendingRead
from isthmus.protocol.fingerprints import GRADIENTS, STATE, SUMMANDS, StepFingerprint
from isthmus.protocol.run_messages import Arrived, Item
from isthmus.runtime.messages.assignment import Fingerprinting
from isthmus.training.digests import fold, leaf, quick_leaf
from isthmus.training.snapshot import Snapshot

Leaves = dict[str, dict[str, str]]  # the digests of each node's leaves
Value = Tensor | PendingRead | Snapshot | float


class Fingerprinter:
    """Any thread may hand something over; the compute lane ends items."""

    def __init__(self, settings: Fingerprinting | None, accelerator: Accelerator = HOST) -> None:
        """None: nothing is hashed."""
        self._settings = settings
        self._accelerator = accelerator
        self._queue: queue.SimpleQueue[tuple[Item | int, str, str, Value] | Future[None] | None] = queue.SimpleQueue()
        self._by_item: dict[int, Leaves] = {}
        self._by_step: dict[int, Leaves] = {}  # leaves of values inside the stage by step: the engine knows no items
        self._done: queue.SimpleQueue[StepFingerprint] = queue.SimpleQueue()
        if settings is not None:
            threading.Thread(target=self._hash, args=(settings,), name="fingerprints", daemon=True).start()

    @property
    def on(self) -> bool:
        return self._settings is not None

    def sent(self, body: Arrived, target: int, tensors: Mapping[str, Tensor]) -> None:
        self._message(body, f"sent {body.parcel} {target}", tensors)

    def received(self, body: Arrived, tensors: Mapping[str, Tensor]) -> None:
        self._message(body, f"received {body.parcel} {body.source}", tensors)

    def _message(self, body: Arrived, node: str, tensors: Mapping[str, Tensor]) -> None:
        if self.on:
            values: Mapping[str, Tensor | float] = tensors or {"number": body.number}
            if body.parcel == "shared":
                values = {name: self._unchanged(value) for name, value in tensors.items()}
            elif body.parcel == "norms":  # each alone: another cut has them in other stages
                values = {f"{number}": norm for number, norm in enumerate(tensors["norms"])}
            for name, value in values.items():
                self._put(body.item, node, f"{body.micro_batch} {name}", value)

    def _unchanged(self, value: Tensor) -> Tensor:
        """Return a value that stays, of a tensor that is changed in place before long."""
        return value if self._accelerator.asynchronous else value.clone()

    def _put(self, item: int, node: str, name: str, value: Tensor | float) -> None:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            dense = value.detach().to_dense() if value.is_sparse else value.detach()
            self._queue.put((item, node, name, PendingRead(self._accelerator, dense)))
        else:
            self._queue.put((item, node, name, value))

    def summand(self, item: int, group: int, flat: Tensor) -> None:
        """Add the tensor that this stage adds to a sum, which is made in place."""
        if self.on:
            self._put(item, SUMMANDS, f"{group}", self._unchanged(flat))

    def gradients(self, item: int, found: Mapping[str, Tensor]) -> None:
        """Before they are clipped: no other stage has a part in them."""
        for name, gradient in found.items():
            self._put(item, GRADIENTS, name, gradient)

    def totals(self, item: int, owned: Sequence[str], norms: Tensor, count: float | None) -> None:
        """For an audit: what stages of another cut tell each other of these parameters, and of the loss."""
        if self._settings is not None and self._settings.leaves:
            for name, norm in zip(owned, norms, strict=False):
                self._put(item, "norms", name, norm)
            if count is not None:
                self._put(item, "count", "number", count)

    def state(self, item: int, saved: Snapshot) -> None:
        """Add the state that a checkpoint gets."""
        if self.on:
            self._queue.put((item, STATE, "", saved))

    def inside(self, step: int, node: str, name: str, value: Tensor) -> None:
        """A value that no message carries."""
        self._put(-1 - step, node, name, value)

    def end(self, item: Item) -> None:
        """All that was to come of the item has been handed over."""
        if self.on:
            self._queue.put((item, "", "", 0.0))

    def before_changes(self) -> None:
        """Wait until what was handed over may change."""
        if not self._accelerator.asynchronous:
            self._wait()

    def _wait(self) -> None:
        if self.on:
            self._queue.put(reached := Future[None]())
            reached.result()

    def take(self, *, wait: bool) -> tuple[StepFingerprint, ...]:
        """Those that are done; with `wait` all of items that have ended."""
        if wait:
            self._wait()
        return tuple(self._done.get() for _ in range(self._done.qsize()))

    def close(self) -> None:
        self._queue.put(None)

    def _hash(self, settings: Fingerprinting) -> None:
        failure: Exception | None = None
        while (found := self._queue.get()) is not None:
            try:
                if not isinstance(found, Future):
                    self._take_in(settings, *found)
                elif failure is None:
                    found.set_result(None)
                else:
                    found.set_exception(failure)
            except Exception as e:  # of any kind: who waits must learn of it
                failure = e

    def _take_in(self, settings: Fingerprinting, of: Item | int, node: str, name: str, value: Value) -> None:
        if isinstance(of, Item):
            self._end(of, settings)
            return
        leaves = self._by_item.setdefault(of, {}) if of >= 0 else self._by_step.setdefault(-1 - of, {})
        if isinstance(value, Snapshot):
            value.wait()
            leaves[node] = {part: leaf(settings.key, tensor) for part, tensor in value.tensors().items()}
            return
        if isinstance(value, PendingRead):
            value = value.values()
        if node == GRADIENTS and isinstance(value, Tensor):
            digest = quick_leaf(settings.key, value)
        else:
            digest = leaf(settings.key, value)
        leaves.setdefault(node, {})[name] = digest

    def _end(self, item: Item, settings: Fingerprinting) -> None:
        nodes = self._by_item.pop(item.index, {})
        if item.kind not in ("train", "save"):
            return
        nodes |= self._by_step.pop(item.step, {}) if item.kind == "train" else {}
        if settings.leaves:
            digests = {f"{node}/{name}": digest for node, of in nodes.items() for name, digest in of.items()}
        else:
            digests = {node: fold(settings.key, leaves) for node, leaves in nodes.items()}
        self._done.put(StepFingerprint(step=item.step + (item.kind == "train"), digests=digests))
