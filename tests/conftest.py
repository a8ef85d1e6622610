"""One torch thread everywhere, as in device processes: the number of threads changes the order of sums.

With CI set in the environment, hypothesis draws the same examples every time: what it finds by luck is for people who
can look at it, not for a run that decides whether a change lands.
"""

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from isthmus.runtime.processes import launcher

from .nurseries import end_all, kept_nursery

torch.set_num_threads(1)
# A suite that was started in the background may have inherited that Ctrl-C is ignored, and would pass that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
logging.getLogger("torch").setLevel(logging.WARNING)
settings.register_profile("ours", derandomize=bool(os.environ.get("CI")), deadline=None)  # no test asserts a time
settings.load_profile("ours")

LONG = ("sync", "runtime", "fleet_service", "faults", "federated", "graph", "training", "planners")
"""Folders whose files take minutes: they come first, so that what is left for the last worker is short."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.parent.name) if item.path.parent.name in LONG else len(LONG))


@pytest.fixture(autouse=True, scope="session")
def _nurseries_are_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "Nursery", kept_nursery)
        yield
    end_all()
