"""What each tracker's own library finds of a run, in one form."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Found(NamedTuple):
    figures: dict[str, list[tuple[int, float]]]
    """By name: (step, value)."""
    settings: dict[str, str]
    group: str | None
    """None: the tracker has no place for it. So, too, of what follows."""
    events: list[str] | None
    pictures: list[str] | None
    outcome: str


def of_tensorboard(folder: Path) -> Found:
    library = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = library.EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    tags = events.Tags()

    def texts(name: str) -> list[str]:
        return [e.tensor_proto.string_val[0].decode() for e in events.Tensors(f"{name}/text_summary")]

    lines = "".join(texts("settings")).splitlines()
    pairs = [line.strip().rstrip(",").partition(": ") for line in lines if ": " in line]
    return Found(
        figures={name: [(e.step, e.value) for e in events.Scalars(name)] for name in tags["scalars"]},
        settings={key.strip('"'): value.strip('"') for key, _, value in pairs},
        group=None,
        events=texts("events"),
        pictures=list(tags["images"]),
        outcome=texts("outcome")[-1],
    )


def of_wandb(folder: Path) -> Found:
    importlib.import_module("wandb").teardown()  # its process would stay
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    history: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    settings: dict[str, str] = {}
    group = ""
    ids: set[str] = set()
    for file in sorted(folder.glob("run/wandb/offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime):
        for data in leveldb_records(file.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                group = record.run.run_group or group
                ids.add(record.run.run_id)
                settings |= {u.key or u.nested_key[0]: str(json.loads(u.value_json)) for u in record.run.config.update}
            if record.HasField("history"):
                items = record.history.item
                history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
            if record.HasField("summary"):
                summary |= {u.key or u.nested_key[0]: json.loads(u.value_json) for u in record.summary.update}
    assert len(ids) == 1, "one run"
    figures: dict[str, list[tuple[int, float]]] = {}
    for row in history:
        for key, value in row.items():
            if isinstance(value, int | float) and not key.startswith("_") and "step" in row:
                figures.setdefault(key, []).append((row["step"], value))
    return Found(
        figures=figures,
        settings=settings,
        group=group,
        events=[value for key, value in summary.items() if key.startswith("event.")],
        pictures=[key for row in history for key in row if key.startswith("pictures/")],
        outcome=summary["outcome"],
    )


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """A .wandb file: after a header of 7 bytes, LevelDB's log: blocks of 32 KiB, whose records are parts of ours."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""


def of_trackio(folder: Path) -> Found:
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    (name,) = storage.get_runs("isthmus")
    rows, settings = storage.get_logs("isthmus", name), storage.get_run_config("isthmus", name)
    figures: dict[str, list[tuple[int, float]]] = {}
    pictures: list[str] = []
    for row in rows:
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step":
                figures.setdefault(key, []).append((row["step"], value))
            elif key.startswith("pictures/"):
                pictures.append(key)
    alerts = sorted(storage.get_alerts("isthmus", name), key=lambda alert: alert["timestamp"])
    ended = [alert["text"] for alert in alerts if alert["title"] == "the run ended"]
    return Found(
        figures=figures,
        settings={key: str(value) for key, value in settings.items()},
        group=settings["_Group"],
        events=[alert["text"] for alert in alerts],
        pictures=pictures,
        outcome=ended[-1],
    )


def of_mlflow(folder: Path) -> Found:
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("isthmus")
    (run,) = client.search_runs([experiment.experiment_id])
    id_, tags = run.info.run_id, run.data.tags
    return Found(
        figures={n: [(m.step, m.value) for m in client.get_metric_history(id_, n)] for n in run.data.metrics},
        settings=run.data.params,
        group=tags["group"],
        events=[value for key, value in tags.items() if key.startswith("event.")],
        pictures=[f"pictures/{file.path}" for file in client.list_artifacts(id_, "pictures")],
        outcome=tags["outcome"],
    )


def of_prometheus(folder: Path) -> Found:
    parse = importlib.import_module("prometheus_client.parser").text_string_to_metric_families
    figures: dict[str, list[tuple[int, float]]] = {}
    group, outcome = "", ""
    for family in parse((folder / "run" / "metrics.prom").read_text()):
        for sample in family.samples:
            name, of = sample.name.removeprefix("isthmus_"), sample.labels.get("of", "")
            figures.setdefault(f"{name}/{of}" if of else name, []).append((0, sample.value))
            group = sample.labels["group"]
            outcome = of if name == "outcome" else outcome
    step = int(figures["step"][0][1])
    return Found(
        figures={name: [(step, value) for _, value in points] for name, points in figures.items()},
        settings={},
        group=group,
        events=None,
        pictures=None,
        outcome=outcome,
    )


READERS: Mapping[str, Callable[[Path], Found]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "trackio": of_trackio,
    "mlflow": of_mlflow,
    "prometheus": of_prometheus,
}
LIBRARIES = {"prometheus": "prometheus_client"}
