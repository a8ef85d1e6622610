"""A small federated job over sites, and the files of its sites. Training takes next to no time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

NAME = "sites"
MODEL = """
[model]
name = "mlp"
options = { features = 64, width = 64, layers = 1, classes = 10 }
"""
JOB = """
name = "{name}"
{model}
[federated]
algorithm = "{algorithm}"
rounds = {rounds}

[federated.deployment]
sites = {sites}
"""
SITE = """
job = "{name}"
{model}
[algorithm]
name = "{algorithm}"

[data]
kind = "npz"
options = {{ path = "{data}", holdout = 0 }}
"""


def write_job(path: Path, sites: Sequence[str], algorithm: str, rounds: int) -> None:
    names = msgspec.json.encode(sites).decode()
    path.write_text(JOB.format(name=NAME, model=MODEL, algorithm=algorithm, rounds=rounds, sites=names))


def write_site(path: Path, algorithm: str, seed: int = 0) -> None:
    """The site's file, and its 40 samples beside it."""
    draws, data = np.random.default_rng(seed), path.with_suffix(".npz")
    np.savez(data, pixel_values=draws.standard_normal((40, 64)).astype(np.float32), labels=draws.integers(0, 10, 40))
    path.write_text(SITE.format(name=NAME, model=MODEL, algorithm=algorithm, data=data))
