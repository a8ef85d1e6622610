"""The operators that a graph may hold: a graph that came over a link can call these and nothing else.

`allowlist.txt` names PyTorch ATen operators that compute tensors from tensors and numbers: none reads a file,
prints, changes a storage or runs code.
"""

from __future__ import annotations

from importlib import resources

ALLOWED = frozenset(resources.files("isthmus.graph").joinpath("allowlist.txt").read_text().split())


def is_allowed(target: str) -> bool:
    """Whether an operator such as `aten.linear.default` is on the list."""
    namespace, _, rest = target.partition(".")
    return namespace == "aten" and rest.partition(".")[0] in ALLOWED
