"""Early stopping, by the loss or a metric of evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from isthmus.callbacks.callback import Callback
from isthmus.callbacks.events import Evaluated, RunStarted
from isthmus.errors import UserError


class EarlyStopping(Callback):
    """Ends a run, with a checkpoint, `after` so many evaluations in a row without a better value.

    In a job file: `[[callback]]` with `name = "isthmus:EarlyStopping"` and `options = { metric = "accuracy" }`. A
    resumed run counts from its own first evaluation.

    >>> from isthmus.callbacks import Evaluated, RunStarted
    >>> from pathlib import Path
    >>> stopping = EarlyStopping(after=2)
    >>> stopping.start(RunStarted(run=Path("runs/a"), kind="pipeline", steps=9, stop=print))
    >>> for step, loss in enumerate((0.7, 0.5, 0.5, 0.6)):
    ...     stopping.evaluation(Evaluated(step=step, loss=loss))
    loss was not better than 0.5 for 2 evaluations (best at step 1)
    """

    def __init__(
        self, metric: str = "loss", *, after: int = 3, least: float = 0.0, lower_is_better: bool | None = None
    ) -> None:
        """`metric` is `loss` or one of the job's metrics, on held-out samples or, where there are none, the mean over
        clients. A value is better by more than `least`. By default low values are good of `loss`, `perplexity` and
        functions that say `lower_is_better`. One that is not finite is no better. UserError for `after` below 1, and
        for `least` that is no number from 0."""
        if type(after) is not int or after < 1:
            raise UserError(f"EarlyStopping: after: got {after!r}, expected a whole number of at least 1")
        if not isinstance(cast(object, least), int | float) or not 0 <= least < math.inf:
            raise UserError(f"EarlyStopping: least: got {least!r}, expected a number from 0")
        self._metric, self._after, self._least = metric, after, least
        self._lower_is_better = lower_is_better
        self._sign = 1.0
        self._best: float | None = None
        self._best_at = ""
        self._worse = 0
        self._at = "at step"
        self._stop: Callable[..., None] = lambda _: None

    def check(self, started: RunStarted) -> None:
        """UserError for a metric that the job does not have, and for a job that evaluates nothing."""
        known = ("loss", *started.metrics)
        if self._metric not in known:
            raise UserError(f"EarlyStopping: metric: got {self._metric!r}, expected one of {', '.join(known)}")
        if cast("dict[str, object]", started.settings.get("training", {})).get("eval_every") == 0:
            raise UserError("EarlyStopping: nothing is evaluated, expected training.eval_every above 0")

    def start(self, started: RunStarted) -> None:
        """UserError as of `check`."""
        self.check(started)
        given = self._lower_is_better
        self._sign = -1.0 if (self._metric in started.lower_is_better if given is None else given) else 1.0
        self._at = "at step" if started.kind == "pipeline" else "in round"
        self._stop, self._best, self._worse = started.stop, None, 0

    def evaluation(self, evaluated: Evaluated) -> None:
        """The run stops after so many evaluations that were no better."""
        found = evaluated.loss if self._metric == "loss" else evaluated.metrics.get(self._metric)
        value = evaluated.clients.get(self._metric) if found is None else found
        if value is None:
            return
        if math.isfinite(value) and (self._best is None or self._sign * (value - self._best) > self._least):
            self._best, self._best_at, self._worse = value, f"{self._at} {evaluated.step}", 0
            return
        self._worse += 1
        if self._worse == self._after:
            self._stop(self._reason())

    def _reason(self) -> str:
        count = f"{self._after} evaluation{'s' if self._after > 1 else ''}"
        if self._best is None:
            return f"{self._metric} was not finite for {count}"
        least = f" by more than {self._least:g}" if self._least else ""
        return f"{self._metric} was not better than {self._best:.4g}{least} for {count} (best {self._best_at})"
