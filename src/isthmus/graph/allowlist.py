"""The operators that a graph may hold: a graph that came over a link can call these and nothing else.

`allowlist.txt` names PyTorch ATen operators that compute tensors from tensors and numbers: none reads a file,
prints, changes a storage or runs code. A line is a name, which stands for all its overloads, or a name and an overload.

Not on it: operators that trust their arguments, such as indices into memory, to come from another part of torch
(most names that begin with an underscore, and what public functions are made of), and operators whose results have a
size that depends on data, which no graph can hold. What a name and its arguments must also satisfy: `operators`.
"""

from __future__ import annotations

from importlib import resources

ALLOWED = frozenset(resources.files("isthmus.graph").joinpath("allowlist.txt").read_text().split())


def is_allowed(target: str) -> bool:
    """Whether an operator such as `aten.linear.default` is on the list."""
    namespace, _, overload = target.partition(".")
    return namespace == "aten" and (overload in ALLOWED or overload.partition(".")[0] in ALLOWED)
