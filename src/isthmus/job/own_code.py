"""Models of the user's own code that follow from the text of one file, and so can be kept once they are captured."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import sys
from pathlib import Path

_IMPORTED = frozenset(  # such a file may import these and nothing else: they read no files, no environment and no clock
    {"__future__", "collections", "dataclasses", "enum", "functools", "itertools", "math", "torch", "typing"}
)
_REFUSED = frozenset(
    {"__builtins__", "__dict__", "__import__", "accelerator", "backends", "builtins", "compile", "cuda", "distributed"}
    | {"eval", "exec", "from_file", "get_num_threads", "getattr", "globals", "hub", "initial_seed", "input"}
    | {"is_available", "load", "load_library", "load_state_dict_from_url", "load_url", "model_zoo", "mps", "open", "os"}
    | {"pathlib", "serialization", "sys", "vars", "version", "xpu"}
)
"""Names by which the file could depend on something else: on other files, on the machine or on what is typed."""


def digest_of_module(name: str) -> str | None:
    """A digest of the file behind `module:callable`; None unless what it builds follows from that file alone.

    None too for a module that this process has imported: its file may have been edited since. The module is not
    imported here.
    """
    module, _, attribute = name.partition(":")
    if not attribute or "." in module or module in sys.modules:
        return None
    spec = importlib.machinery.PathFinder.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py") or spec.submodule_search_locations:
        return None
    try:
        text = Path(spec.origin).read_bytes()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return None
    return hashlib.sha256(text).hexdigest() if all(map(_is_closed, ast.walk(tree))) else None


def _is_closed(node: ast.AST) -> bool:
    """Return whether this part of a module reads nothing from outside it."""
    match node:
        case ast.Import(names=names):
            return all(_is_allowed(alias.name) for alias in names)
        case ast.ImportFrom(module=module, level=level, names=names):
            return not level and _is_allowed(module or "") and all(alias.name not in _REFUSED for alias in names)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name not in _REFUSED
        case _:
            return True


def _is_allowed(module: str) -> bool:
    first, *others = module.split(".")
    return first in _IMPORTED and _REFUSED.isdisjoint(others)
