"""The samples of one of several replicas that share each batch, in the order in which one process would take them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from torch import Tensor

from isthmus.data.dataset import Dataset, Indices, SamplesOf, batch_at, joined, sample_order
from isthmus.wire_types import Place, Positive, Seed

MOST_STEPS = 1 << 32  # steps of a replica for which there are samples: more than any run has
MOST_BATCH = (1 << 63) // MOST_STEPS - 1  # so that the last sample's place is a whole number of 64 bits


class ReplicaShare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which samples a replica trains on, step after step. ValueError for a share that is not one of the batch."""

    number: Place
    own: Positive  # samples of one of its steps
    batch: Positive  # samples of a step of all replicas together
    seed: Seed  # the seed of the order of all samples
    shuffle: bool

    def __post_init__(self) -> None:
        if not (self.number + 1) * self.own <= self.batch <= MOST_BATCH:
            raise ValueError(f"{self.own} samples of a batch of {self.batch} for replica {self.number}")

    @property
    def samples(self) -> int:
        """Samples of all of its steps."""
        return MOST_STEPS * self.own


class ReplicaSamples(SamplesOf):
    """A data set of one replica's samples, step after step."""

    def __init__(self, dataset: Dataset, share: ReplicaShare) -> None:
        """`dataset` is that of all replicas."""
        super().__init__(dataset)
        self._order = sample_order(self._dataset, share.seed, share.shuffle)
        self._share = share

    def __len__(self) -> int:
        return self._share.samples

    def batch(self, indices: Indices, columns: Sequence[str]) -> dict[str, Tensor]:
        share = self._share
        steps, offsets = np.divmod(np.asarray(indices, dtype=np.int64), share.own)
        positions = steps * share.batch + share.number * share.own + offsets
        stretches = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        parts = [batch_at(self._dataset, self._order, int(s[0]), len(s), columns) for s in stretches]
        return parts[0] if len(parts) == 1 else joined(parts)
