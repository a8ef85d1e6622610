"""Published JSON schemas of documents that launchers write; README.md names their sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

_FOLDER = Path(__file__).parent


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """jsonschema's ValidationError for a manifest of Kubernetes that is not as its kind demands."""
    definitions = json.loads((_FOLDER / "kubernetes.json").read_text())["$defs"]
    jsonschema.validate(manifest, {"$ref": f"#/$defs/{manifest['kind']}", "$defs": definitions})


def check_task(task: Mapping[str, Any]) -> None:
    """jsonschema's ValidationError for a task that SkyPilot would not take."""
    schemas = json.loads((_FOLDER / "skypilot.json").read_text())
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])
