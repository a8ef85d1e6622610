"""How much a run's messages have told of its samples: kept in its folder, from session to session.

Every item counts that devices hear of, before they do: whatever is done again after a loss counts again. On record is
more than that, the rest of the pass, until the session ends: who is killed leaves no less there than was sent.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.errors import UserError
from isthmus.plan import SPENT, ActivationNoise, Spent, Stretch, format_epsilon, read_spent
from isthmus.protocol.work import Item
from isthmus.runtime.conducting.leaving import Protection
from isthmus.training.accounting import epsilon_of, spent_by_epoch, squared_mu


def opened_ledger(folder: Path, noise: ActivationNoise | None, size: int) -> Ledger | None:
    """None where nothing is to be counted. UserError where a run that was counted would go on without noise."""
    if noise is not None:
        return Ledger(folder, noise.delta, size)
    if (before := read_spent(folder)) is not None:
        raise UserError(f"privacy.activations: got none, expected the run's, which promises {before}")
    return None


class Ledger:
    """Of one run: what its sessions sent, this one and those before."""

    def __init__(self, folder: Path, delta: float, size: int) -> None:
        """UserError for a record that cannot be read, or counts other data."""
        before = read_spent(folder)
        if before is not None and before.size != size:
            raise UserError(f"{folder / SPENT}: counts {before.size} training samples, expected {size}")
        self._path, self._delta, self._size = folder / SPENT, delta, size
        self._stretches: tuple[Stretch, ...] = before.stretches if before is not None else ()
        self._begun = len(self._stretches)
        """Where this session's stretches begin."""
        self._heldout = before.heldout_mu_squared if before is not None else 0.0
        self._recorded: tuple[int, int, float] | None = None

    def opened(self, item: Item, micro_batch_size: int, protection: Protection) -> None:
        """The item's samples are about to be sent, under this protection."""
        if item.kind == "train":
            one = squared_mu(protection.noise_multiplier, protection.train)
            self._send(Stretch(
                first=item.first_sample, end=item.first_sample + item.micro_batches * micro_batch_size, mu_squared=one
            ))  # fmt: skip
        elif item.kind == "eval" and not item.first_sample:  # an evaluation's other items are of other samples
            self._heldout += squared_mu(protection.noise_multiplier, protection.heldout)
        now = len(self._stretches), self._passes, self._heldout
        if now != self._recorded:
            self._recorded = now
            self._write(self._spent(self._reserved()))

    def _send(self, new: Stretch) -> None:
        last = self._stretches[-1] if len(self._stretches) > self._begun else None
        if last is not None and (last.end, last.mu_squared) == (new.first, new.mu_squared):
            self._stretches = (*self._stretches[:-1], msgspec.structs.replace(last, end=new.end))
        else:
            self._stretches = (*self._stretches, new)

    @property
    def _passes(self) -> int:
        return -(-max((s.end for s in self._stretches), default=0) // self._size)

    def _reserved(self) -> tuple[Stretch, ...]:
        """As if the pass of the last stretch were sent to its end."""
        if len(self._stretches) == self._begun:
            return self._stretches
        last = self._stretches[-1]
        end = -(-last.end // self._size) * self._size
        return (*self._stretches[:-1], msgspec.structs.replace(last, end=end))

    def after(self, item: Item, batch: int) -> str:
        """What to say of a finished item: something, where it ends a pass over the data."""
        passes = (item.step + 1) * batch // self._size
        if item.kind != "train" or passes == item.step * batch // self._size:
            return ""
        told = epsilon_of(spent_by_epoch(self._stretches, self._size)[passes - 1], self._delta)
        return f"epoch {passes}: each sample's local epsilon is {format_epsilon(told)} at delta {self._delta:g}"

    def close(self) -> Spent:
        """Exactly what was sent is on record."""
        spent = self._spent(self._stretches)
        if self._recorded is not None:
            self._write(spent)
        return spent

    def _spent(self, stretches: tuple[Stretch, ...]) -> Spent:
        by_epoch = tuple(epsilon_of(spent, self._delta) for spent in spent_by_epoch(stretches, self._size))
        return Spent(
            delta=self._delta, epsilon=by_epoch[-1] if by_epoch else 0.0,
            heldout_epsilon=epsilon_of(self._heldout, self._delta), by_epoch=by_epoch, size=self._size,
            stretches=stretches, heldout_mu_squared=self._heldout,
        )  # fmt: skip

    def _write(self, spent: Spent) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(spent), indent=1))
        new.replace(self._path)
