"""Which operators JAX computes, by name: known without JAX, to planners and to devices."""

from __future__ import annotations

from importlib import resources

NAMES = frozenset(resources.files("isthmus.training.jax").joinpath("operators.txt").read_text().split())
"""The names in the table (`table.OPERATORS`), without overloads."""
LEFT_OUT = frozenset(
    {
        *("aten.narrow.Tensor", "aten.view.dtype", "aten.where.default"),
        *(f"aten.{product}.dtype" for product in ("addmm", "baddbmm", "bmm", "mm")),
        *("aten.copy_.float", "aten.copy_.int", "aten.copy_.Tensor", "aten.einsum.sublist"),
    }
)
"""Overloads whose sizes depend on values, that read memory as another type, that torch has for accelerators alone, or
that only TorchScript calls."""


def is_computed(target: str) -> bool:
    return base_name(target) in NAMES and target not in LEFT_OUT


def base_name(target: str) -> str:
    """`add` of `aten.add_.Tensor`."""
    name = target.split(".")[1]
    return name if name.startswith("__") else name.rstrip("_")
