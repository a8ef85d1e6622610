"""Which examples hypothesis draws: `make test` the same ones every time, `make fuzz` fresh ones.

What fails in `make fuzz` is kept in `tests/kept_examples`, which `make test` tries first and never writes. An entry
belongs to the source of its test: when the test changes, the entry is lost, so a mended failure is also written down as
an `@example` of the test.

hypothesis would draw the same examples by `derandomize` or by a seed, but then tries no kept ones.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, core, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ReadOnlyDatabase
from hypothesis.internal.conjecture import providers

KEPT = Path(__file__).parent / "kept_examples"


def register(config: pytest.Config, kept: Path = KEPT) -> None:
    """Profiles `same`, the default, and `fuzz`. Neither knows time: no deadline, no check of how long drawing takes."""
    database = DirectoryBasedExampleDatabase(kept)
    timeless = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("fuzz", timeless, database=database, print_blob=True)
    settings.register_profile("same", timeless, database=ReadOnlyDatabase(database))
    chosen = config.getoption("hypothesis_profile") or "same"
    settings.load_profile(chosen)
    if chosen == "same":
        config.pluginmanager.register(SameDraws())


class SameDraws:
    """Before every test; `test_examples.py` fails where a newer hypothesis no longer works like this."""

    def pytest_runtest_setup(self) -> None:
        core.threadlocal._hypothesis_global_random = Random(0)
        # Else it also draws numbers from the source of all modules that other tests happened to import.
        providers._get_local_constants = providers.Constants
