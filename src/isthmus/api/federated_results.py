"""A federated run, by its folder."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from isthmus.api.federated_runs import trained_model
from isthmus.api.folder import RunFolder
from isthmus.federated.evaluation import Evaluation
from isthmus.federated.history import RoundHistory, RoundLine
from isthmus.federated.job import FederatedJob
from isthmus.models.given import WithLoss

PICTURES = {"accuracy": "accuracy.png", "round": "round.png", "paces": "paces.png"}


class FederatedResult:
    """What a federated run was given and what it left. Everything is read from its folder when it is asked for.

    UserError for a folder that is not there or holds no federated run.

    >>> result = isthmus.FederatedResult(federated)
    >>> result.outcome, len(result.rounds), result.evaluation.loss > 0
    ('done', 2, True)
    """

    def __init__(self, path: str | Path, outcome: str | None = None) -> None:
        self._folder = RunFolder.existing(Path(path))
        self._folder.check_kind(federated=True)
        self._outcome = outcome

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def job(self) -> FederatedJob:
        """As it was run: with what was overridden."""
        return self._folder.read(FederatedJob)

    @property
    def rounds(self) -> list[RoundLine]:
        """What became of each committed round: who took part, seconds, bytes, evaluation."""
        return RoundHistory.of(self.path).lines()

    @property
    def evaluation(self) -> Evaluation | None:
        """The newest: loss and accuracy on held-out samples; None where nothing was evaluated."""
        return next((line.evaluation for line in reversed(self.rounds) if line.evaluation is not None), None)

    @property
    def model(self) -> nn.Module:
        """The server's, after the last committed round; of one that was given beside a loss, without it."""
        found = trained_model(self._folder, self.job)[0]
        return found.model if isinstance(found, WithLoss) else found

    @property
    def pictures(self) -> dict[str, Path]:
        """PNG files that are there: `accuracy`, `round` and `paces`."""
        return {name: self.path / file for name, file in PICTURES.items() if (self.path / file).is_file()}

    @property
    def outcome(self) -> str:
        """`done`, or `interrupted` where rounds are left to do."""
        done = max((line.record.round + 1 for line in self.rounds), default=0)
        return self._outcome or ("done" if done >= self.job.federated.rounds else "interrupted")

    def __repr__(self) -> str:
        return f"FederatedResult({str(self.path)!r})"
