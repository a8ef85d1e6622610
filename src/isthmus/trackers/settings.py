"""The table `[track]` of a job."""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.errors import UserError


class Track(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run's figures go besides its folder. A tracker that fails never stops the run.

    >>> Track(to=("tensorboard", "wandb"), options={"wandb": {"mode": "offline"}}).project
    'isthmus'
    """

    to: str | tuple[str, ...] = ()
    """`csv`, `jsonl`, `tensorboard`, `wandb`, `trackio`, `mlflow`, `prometheus`, a name registered under the
    entry-point group `isthmus.trackers`, or `package.module:Class` of your own."""
    project: Annotated[str, msgspec.Meta(min_length=1)] = "isthmus"
    """Project of wandb and trackio, experiment of mlflow."""
    group: str = ""
    """Runs that belong together. Empty: of a sweep its name, else none."""
    options: dict[str, dict[str, object]] = {}
    """A table of options for each tracker (`isthmus describe NAME`)."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all trackers."""
        return (self.to,) if isinstance(self.to, str) else self.to

    def check(self) -> None:
        """UserError for a tracker named twice, and for options of one that is not named."""
        for name in self.names:
            if self.names.count(name) > 1:
                raise UserError(f"track.to: got {name!r} twice, expected each once")
        for name in self.options:
            if name not in self.names:
                raise UserError(f"track.options: got {name!r}, expected one of track.to: {', '.join(self.names)}")
