"""Libraries that compute stages, and engines that start agents on a cluster."""

from __future__ import annotations

from typing import Literal, get_args

from isthmus.errors import UserError, unknown_name

EngineName = Literal["torch", "jax"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

CLUSTER_ENGINES = ("local", "ssh", "ray", "slurm", "kubernetes", "skypilot")
"""Ours, of `isthmus up --on`. `runtime.launchers.launcher` has what each starts agents with."""


def check_engine(field: str, name: str) -> EngineName:
    """UserError for a name that is none."""
    if name not in ENGINES:
        raise UserError(f"{field}: {unknown_name('engine', name, ENGINES)}")
    return name
