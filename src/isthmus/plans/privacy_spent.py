"""The record of what a run's messages disclosed of its samples: `privacy.json` in its folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.errors import UserError

SPENT = "privacy.json"


def format_epsilon(epsilon: float) -> str:
    """Three digits; "12,345" where they would need an exponent."""
    return f"{epsilon:.3g}" if epsilon < 999.5 else f"{epsilon:,.0f}"


class SampleRange(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of the data order whose samples left a holder, each once."""

    first: int
    end: int
    """One past the last."""
    mu_squared: float
    """Of one pass."""


class PrivacySpent(msgspec.Struct, frozen=True, kw_only=True):
    """Local (epsilon, delta)-differential privacy of each sample: one put in another's place."""

    delta: float
    epsilon: float = 0.0
    """Of the training sample that was sent most often."""
    heldout_epsilon: float = 0.0
    by_epoch: tuple[float, ...] = ()
    """Epsilon after each pass over the training samples, the one under way included."""
    samples: tuple[int, ...]
    """Training samples: how many, or of each of several holders with data of their own."""
    stretches: tuple[tuple[SampleRange, ...], ...] = ()
    """Of the order of each holder's data, that were sent."""
    heldout_mu_squared: float = 0.0

    def __str__(self) -> str:
        heldout = f"; held-out samples {format_epsilon(self.heldout_epsilon)}" if self.heldout_epsilon else ""
        epochs = f"{len(self.by_epoch)} epoch{'' if len(self.by_epoch) == 1 else 's'}"
        return f"epsilon {format_epsilon(self.epsilon)} at delta {self.delta:g} after {epochs}{heldout}"


def read_spent(folder: Path) -> PrivacySpent | None:
    """None where nothing was counted. UserError for what cannot be read."""
    try:
        return msgspec.json.decode((folder / SPENT).read_bytes(), type=PrivacySpent)
    except FileNotFoundError:
        return None
    except ValueError as e:  # msgspec's, or UnicodeDecodeError
        raise UserError(f"{folder / SPENT}: cannot be read: {e}") from None
