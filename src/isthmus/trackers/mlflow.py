"""MLflow: a server, or an SQLite file that `mlflow ui` shows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from isthmus.extensions import import_extra
from isthmus.trackers.tracker import TrackedRun

OWNER = "track.to: mlflow"
DATABASES = frozenset({"sqlite", "postgresql", "mysql", "mssql"})
"""Schemes of stores that MLflow opens itself, in this process."""
RUN_TAG = "isthmus.run"  # the tag of a run by which a later session finds it
FLUSH_S = 1.0  # between two transactions: one for each step would take milliseconds of it
MOST_METRICS = 1000  # that a server takes at once
STATUS = {"done": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}


class MlflowOptions(msgspec.Struct, frozen=True, kw_only=True):
    """MLflow: a server, or an SQLite file that `mlflow ui` shows."""

    uri: str = ""
    """The address of the server or the store, as `sqlite:///runs/mlflow.db`. Empty: MLFLOW_TRACKING_URI, else
    `mlflow.db` beside the run's folder."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Libraries that it needs: `mlflow-skinny` speaks with servers, and brings nothing that stores figures here."""
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI", "sqlite:")
        database = uri.partition(":")[0].partition("+")[0] in DATABASES
        return ("mlflow", "sqlalchemy", "alembic") if database else ("mlflow",)


class MlflowTracker:
    """Settings are parameters, figures metrics, pictures artifacts; the group and events are tags."""

    def __init__(self, options: MlflowOptions) -> None:
        self._options = options
        self._entities: Any = None
        self._client: Any = None
        self._run = ""
        self._events = 0
        self._metrics: list[Any] = []
        self._flushed_s = 0.0

    def start(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        library = import_extra("mlflow", OWNER)
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it names each table that it makes
        self._entities = import_extra("mlflow.entities", OWNER)
        beside = run.folder.parent
        uri = said = self._options.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        uri = uri or f"sqlite:///{beside / 'mlflow.db'}"
        for module in self._options.libraries:
            import_extra(module, OWNER)
        self._client = library.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(run.project)
        if found is not None:
            experiment = found.experiment_id
        else:
            artifacts = None if said else (beside / "mlartifacts").as_uri()
            experiment = self._client.create_experiment(run.project, artifact_location=artifacts)
        known = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'") if run.resumed else []
        if known:
            self._run = known[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {RUN_TAG: run.id} | ({"group": run.group} if run.group else {})
        self._run = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        params = [self._entities.Param(key, str(value)[:6000]) for key, value in run.settings.items()]
        for first in range(0, len(params), 100):  # the most that a server takes at once
            self._client.log_batch(self._run, params=params[first : first + 100])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._metrics += [self._entities.Metric(name, value, now_ms, step) for name, value in figures.items()]
        if time.monotonic() - self._flushed_s >= FLUSH_S or len(self._metrics) >= MOST_METRICS:
            self._flush()

    def event(self, step: int, text: str) -> None:
        self._events += 1
        self._client.set_tag(self._run, f"event.{int(time.time())}.{self._events}", f"step {step}: {text}"[:5000])

    def picture(self, name: str, path: Path) -> None:
        self._client.log_artifact(self._run, str(path), "pictures")

    def end(self, outcome: str) -> None:
        self._flush()
        self._client.set_tag(self._run, "outcome", outcome)
        self._client.set_terminated(self._run, STATUS.get(outcome, "FAILED"))

    def _flush(self) -> None:
        self._flushed_s = time.monotonic()
        for first in range(0, len(self._metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=self._metrics[first : first + MOST_METRICS])
        self._metrics = []
