"""Documents as YAML, to be read by people and applied by programs. Only what JSON has is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence


def yaml_text(*documents: Mapping[str, object]) -> str:
    """One document after another, parted by `---`."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: object) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, item in value.items() for line in _entry(f"{_scalar(str(key))}:", item)]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for item in value for line in _item(item)]
    return [_scalar(value)]


def _entry(key: str, value: object) -> list[str]:
    if isinstance(value, str) and value.endswith("\n") and _is_block(value):
        return [f"{key} |", *(f"  {line}".rstrip() for line in value.removesuffix("\n").split("\n"))]
    lines = _lines(value)
    if isinstance(value, (Mapping, list, tuple)) and value:
        return [key, *(f"  {line}" for line in lines)]
    return [f"{key} {lines[0]}"]


def _item(value: object) -> list[str]:
    first, *others = _entry("-", value) if isinstance(value, str) else ["- " + _lines(value)[0], *_rest(value)]
    return [first, *others]


def _rest(value: object) -> list[str]:
    return [f"  {line}" for line in _lines(value)[1:]]


def _is_block(text: str) -> bool:
    """Return whether the text may stand as a literal block: printable, and no line begins or ends with a space."""
    lines = text.removesuffix("\n").split("\n")
    return all(line.isprintable() and line == line.rstrip() for line in lines) and lines[0] == lines[0].lstrip() != ""


def _scalar(value: object) -> str:
    """A plain word stays as it is; all other text in double quotes, which YAML reads as JSON does."""
    if isinstance(value, str):
        plain = value.replace("-", "").replace("_", "").replace("/", "").replace(".", "")
        is_word = plain.isascii() and plain.isalnum() and value[0].isalpha() and value[-1].isalnum()
        return value if is_word and value.lower() not in _RESERVED else json.dumps(value)
    return json.dumps(value)


_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
