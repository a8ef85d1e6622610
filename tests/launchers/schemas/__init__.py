"""Published JSON schemas of documents that launchers write; README.md names their sources."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for

_FOLDER = Path(__file__).parent


@functools.cache
def _kinds() -> tuple[Any, Mapping[str, Any]]:
    """What validates, and the definitions, which were checked once: it takes longer than all else."""
    schema = json.loads((_FOLDER / "kubernetes.json").read_text())
    validates = validator_for(schema)
    validates.check_schema(schema)
    return validates, schema["$defs"]


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """jsonschema's ValidationError for a manifest of Kubernetes that is not as its kind demands."""
    validates, definitions = _kinds()
    schema = {"$ref": f"#/$defs/{manifest['kind']}", "$defs": definitions}
    error = best_match(validates(schema).iter_errors(manifest))
    if error is not None:
        raise error


def check_task(task: Mapping[str, Any]) -> None:
    """jsonschema's ValidationError for a task that SkyPilot would not take."""
    schemas = json.loads((_FOLDER / "skypilot.json").read_text())
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])
