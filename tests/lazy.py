"""Libraries that tests import when they use them: each worker collects all files, and runs the tests of some."""

from __future__ import annotations

from typing import Any

import pytest


class Lazy:
    """A module that the first use of one of its names imports. Without it, the test is skipped."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks what each object of a module is
            raise AttributeError(name)
        return getattr(pytest.importorskip(self._module), name)
