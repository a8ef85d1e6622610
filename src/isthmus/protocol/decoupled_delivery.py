"""Decides the next message to a replica: the newest version of each fragment, then the order that it was given.

A replica that is stopped or slow to receive piles up nothing: versions that it missed are skipped, and it gets the
newest one whole.
"""

from __future__ import annotations

from isthmus.protocol.decoupled_events import (
    NEVER,
    NOTHING_MERGED,
    CollectChanges,
    FragmentSent,
    MergesDone,
    ReplicaOrder,
)
from isthmus.protocol.run_messages import Halt


class Delivery:
    """To one replica. `next` is what fits on its link now."""

    def __init__(self, fragments: int, begun: MergesDone = NOTHING_MERGED) -> None:
        """`begun`: where a run goes on, with a version of every fragment."""
        self._sent = [NEVER] * fragments
        """The version of each fragment that it has, or will once what is on its way has arrived."""
        self._newest = [begun.merge] * fragments
        self._before = [NEVER] * fragments  # the version that each newest one was made from
        self._included = [NEVER] * fragments
        self._samples = [begun.samples] * fragments
        self._asked: CollectChanges | Halt | None = None
        self._halt: Halt | None = None
        self._newest_first = self._is_halted = False

    def publish(self, fragment: int, merge: int, samples: int, included: int = NEVER) -> None:
        """A version is made. `included`: the contribution of this replica that is in it."""
        self._before[fragment], self._newest[fragment] = self._newest[fragment], merge
        self._samples[fragment] = samples
        if included != NEVER:
            self._included[fragment] = included

    def restart(self) -> None:
        """The connection is another one: what was on its way may not have arrived."""
        self._sent = [NEVER] * len(self._sent)
        self._asked, self._is_halted = None, False

    def ask(self, order: CollectChanges | Halt) -> None:
        """After the newest versions. An end is that of this connection alone."""
        self._asked = order

    def halt(self, halt: Halt, *, newest_first: bool = False) -> None:
        """Nothing follows. `newest_first`: it is to have the newest versions before."""
        self._halt, self._newest_first = halt, newest_first

    def next(self) -> ReplicaOrder | None:
        """The next message, which counts as sent; None where nothing is to be sent. A fragment comes before what is
        asked of it: a replica must know of one contribution's fate before it makes the next."""
        if self._halt is not None and not self._newest_first:
            return self._halted()
        for fragment, (sent, newest) in enumerate(zip(self._sent, self._newest, strict=True)):
            if sent != newest:
                self._sent[fragment] = newest
                return FragmentSent(
                    fragment=fragment,
                    merge=newest,
                    whole=sent == NEVER or sent != self._before[fragment],
                    included=self._included[fragment],
                    first=sent == NEVER,
                    samples=self._samples[fragment],
                )
        if self._halt is not None:
            return self._halted()
        asked, self._asked = self._asked, None
        return asked

    def _halted(self) -> Halt | None:
        halt, self._is_halted = None if self._is_halted else self._halt, True
        return halt
