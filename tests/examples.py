"""Which examples hypothesis draws: `make test` the same ones each time, `make fuzz` fresh ones, three times as many.

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

SETTINGS = "_hypothesis_internal_use_settings"
KEPT = Path(__file__).parent / "kept_examples"


def register(config: pytest.Config, kept: Path = KEPT) -> None:
    """Profiles `same`, the default, and `fuzz`. Neither knows time: no deadline, no check of how long drawing takes.
    Both draw alike where `CI` is set, for which hypothesis has a profile of its own that would be their base."""
    database = DirectoryBasedExampleDatabase(kept)
    timeless = settings(deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("fuzz", timeless, database=database, print_blob=True)
    settings.register_profile("same", timeless, database=ReadOnlyDatabase(database))
    chosen = config.getoption("hypothesis_profile") or "same"
    settings.load_profile(chosen)
    if chosen == "same":
        config.pluginmanager.register(SameDraws())


class SameDraws:
    """A third of the examples that tests ask for, and the same ones before every test.

    `test_examples.py` fails where a newer hypothesis no longer works like this.
    """

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        asked = {getattr(item.obj, "__func__", item.obj) for item in items if isinstance(item, pytest.Function)}
        for test in asked:
            if (wanted := getattr(test, SETTINGS, None)) is not None:
                setattr(test, SETTINGS, settings(wanted, max_examples=(wanted.max_examples + 2) // 3))

    def pytest_runtest_setup(self) -> None:
        core.threadlocal._hypothesis_global_random = Random(0)
        # Else it also draws numbers from the source of all modules that other tests happened to import.
        providers._get_local_constants = providers.Constants
