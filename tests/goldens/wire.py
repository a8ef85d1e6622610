"""The schema of every message between machines. Which fields a message has is part of the protocol's version."""

from __future__ import annotations

import typing

import msgspec

from isthmus.runtime.messages import all_messages
from isthmus.runtime.messages.versions import PROTOCOL


def wire() -> dict[str, object]:
    """Message kinds with their fields, types and defaults, as JSON Schema."""
    kinds = sorted(typing.get_args(all_messages.AnyMessage), key=lambda kind: kind.__name__)
    tops, parts = msgspec.json.schema_components(kinds, ref_template="{name}", schema_hook=_other)
    return {"protocol": PROTOCOL, "messages": [top["$ref"] for top in tops], "types": _bare(parts)}


def _other(kind: type) -> dict[str, object]:
    """Of values whose type their receiver checks itself."""
    return {"type": kind.__name__}


def _bare(node: object) -> object:
    """Without docstrings: words are no schema."""
    if isinstance(node, dict):
        return {key: _bare(value) for key, value in node.items() if key not in ("description", "title")}
    return [_bare(item) for item in node] if isinstance(node, list | tuple) else node
