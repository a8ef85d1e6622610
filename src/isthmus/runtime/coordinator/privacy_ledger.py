"""How much a run's messages have disclosed of its samples: kept in its folder, from session to session.

Every item counts that devices hear of, before they do: whatever is done again after a loss counts again. On record is
more than that, the rest of the pass, until the session ends: who is killed leaves no less there than was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from isthmus.disclosure import SPENT, ActivationNoise, PrivacySpent, SampleRange, format_epsilon, read_spent
from isthmus.errors import UserError
from isthmus.plans.schedule import had_before
from isthmus.protocol.work import Item
from isthmus.run_files import write_json
from isthmus.runtime.coordinator.activation_privacy import Protection
from isthmus.training.local_privacy import epsilon_of, spent_by_epoch, squared_mu


def opened_ledger(folder: Path, noise: ActivationNoise | None, samples: Sequence[int]) -> PrivacyLedger | None:
    """None where nothing is to be counted. UserError where a run that was counted would go on without noise."""
    if noise is not None:
        return PrivacyLedger(folder, noise.delta, samples)
    if (before := read_spent(folder)) is not None:
        raise UserError(f"privacy.activations: got none, expected the run's, which promises {before}")
    return None


class _SentSamples:
    """Samples that one holder sent, in the order of its own data."""

    def __init__(self, size: int, before: tuple[SampleRange, ...]) -> None:
        self._size, self.stretches = size, before
        self._begun = len(before)  # where this session's stretches begin

    def send(self, new: SampleRange) -> None:
        last = self.stretches[-1] if len(self.stretches) > self._begun else None
        if last is not None and (last.end, last.mu_squared) == (new.first, new.mu_squared):
            self.stretches = (*self.stretches[:-1], msgspec.structs.replace(last, end=new.end))
        else:
            self.stretches = (*self.stretches, new)

    @property
    def state(self) -> tuple[int, int]:
        """While it is the same, no sample has more to count."""
        return len(self.stretches), -(-max((s.end for s in self.stretches), default=0) // self._size)

    def reserved(self) -> tuple[SampleRange, ...]:
        """Return the ledger as if the pass of the last stretch were sent to its end."""
        if len(self.stretches) == self._begun:
            return self.stretches
        last = self.stretches[-1]
        end = -(-last.end // self._size) * self._size
        return (*self.stretches[:-1], msgspec.structs.replace(last, end=end))


class PrivacyLedger:
    """The ledger of one run: samples that were sent in this session and those before."""

    def __init__(self, folder: Path, delta: float, samples: Sequence[int]) -> None:
        """`samples` of each holder with data of its own, in their order, or of all together. UserError for a record
        that cannot be read, or counts other data."""
        before = read_spent(folder)
        if before is not None and before.samples != tuple(samples):
            raise UserError(f"{folder / SPENT}: counts {before.samples} training samples, expected {tuple(samples)}")
        self._path, self._delta, self._samples = folder / SPENT, delta, tuple(samples)
        known = before.stretches if before is not None else ((),) * len(samples)
        self._sent = [_SentSamples(size, stretches) for size, stretches in zip(samples, known, strict=True)]
        self._heldout = before.heldout_mu_squared if before is not None else 0.0
        self._recorded: tuple[list[tuple[int, int]], float] | None = None

    def opened(self, item: Item, micro_batch_size: int, protection: Protection) -> None:
        """The item's samples are about to be sent, under this protection."""
        if item.kind == "train":
            one = squared_mu(protection.noise_multiplier, protection.train)
            number = item.first_sample // micro_batch_size
            turns = (had_before(self._samples, n) for n in (number, number + item.micro_batches))
            for sent, first, end in zip(self._sent, *turns, strict=True):
                if first < end:
                    sent.send(SampleRange(first=first * micro_batch_size, end=end * micro_batch_size, mu_squared=one))
        elif item.kind == "eval" and not item.first_sample:  # an evaluation's other items are of other samples
            self._heldout += squared_mu(protection.noise_multiplier, protection.heldout)
        now = [sent.state for sent in self._sent], self._heldout
        if now != self._recorded:
            self._recorded = now
            self._write(self._spent([sent.reserved() for sent in self._sent]))

    def after(self, item: Item, batch: int) -> str:
        """Return a line about a finished item; empty unless it ends a pass over the data."""
        size = sum(self._samples)
        passes = (item.step + 1) * batch // size
        if item.kind != "train" or passes == item.step * batch // size:
            return ""
        text = format_epsilon(self._spent([sent.stretches for sent in self._sent]).by_epoch[passes - 1])
        return f"epoch {passes}: each sample's local epsilon is {text} at delta {self._delta:g}"

    def close(self) -> PrivacySpent:
        """Exactly what was sent is on record."""
        spent = self._spent([sent.stretches for sent in self._sent])
        if self._recorded is not None:
            self._write(spent)
        return spent

    def _spent(self, stretches: Sequence[tuple[SampleRange, ...]]) -> PrivacySpent:
        each = [spent_by_epoch(own, size) for own, size in zip(stretches, self._samples, strict=True)]
        passes = max(map(len, each))
        worst = [max(own[min(k, len(own) - 1)] for own in each if own) for k in range(passes)]
        by_epoch = tuple(epsilon_of(spent, self._delta) for spent in worst)
        return PrivacySpent(
            delta=self._delta,
            epsilon=by_epoch[-1] if by_epoch else 0.0,
            heldout_epsilon=epsilon_of(self._heldout, self._delta),
            by_epoch=by_epoch,
            samples=self._samples,
            stretches=tuple(stretches),
            heldout_mu_squared=self._heldout,
        )

    def _write(self, spent: PrivacySpent) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, spent)
