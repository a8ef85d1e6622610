"""Fixtures of all planners' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isthmus.api import proof


@pytest.fixture(autouse=True, scope="module")
def _bounds_are_raised_by_less_work() -> Iterator[None]:
    """Of documents: by a second's, not by five seconds'. What a check accepts does not depend on that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "PLANNING_WORK", 1e8)
        yield
