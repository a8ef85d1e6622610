"""What a command needs is imported when it runs: its help needs no library that an extra installs."""

from __future__ import annotations

import importlib


class LazyImport:
    """A module that is imported when something is taken from it; type checkers see it under `TYPE_CHECKING`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        return getattr(importlib.import_module(self._name), attribute)
