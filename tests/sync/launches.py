"""Two launches by torchrun's launcher: `launches.py WHOLE KILLED`. Prints what their workers print.

Its agent forks the workers, where torchrun has it start interpreters: all that they need is imported here, once, which
takes a processor four seconds.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import sklearn.datasets  # noqa: F401  # the examples import it
import torch._dynamo  # noqa: F401  # an optimizer's first step imports it
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

sys.path.insert(0, str(Path(__file__).parent))

import parity_cases  # pyright: ignore[reportMissingImports]
import resume_cases  # pyright: ignore[reportMissingImports]


def launch(workers: int, act: Callable[..., None], *arguments: Path) -> None:
    """As `torchrun --standalone --nproc-per-node WORKERS`. Raises ChildFailedError where a worker fails."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        max_restarts=0,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        run_id=f"of-{workers}",
    )
    elastic_launch(config, act)(*arguments)


def main(whole: Path, killed: Path) -> None:
    gc.freeze()  # collecting in a worker would copy every page of what was imported
    try:
        launch(2, resume_cases.main, whole, killed)
    except ChildFailedError:  # of whichever the launcher saw first: worker 1, or worker 0 that missed it
        if not (killed / resume_cases.KILLED_AFTER).exists():
            raise
    for later in sorted((killed / "dream").iterdir())[2:]:
        shutil.rmtree(later)
    launch(4, parity_cases.main, killed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
