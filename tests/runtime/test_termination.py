"""SIGTERM ends a command wherever it comes."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref

import pytest

from isthmus.runtime.processes.signals import terminable


class _Kept:
    pass


def _ended(_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_in_a_callback_whose_exceptions_python_ignores() -> None:
    kept = _Kept()
    watching = weakref.ref(kept, _ended)
    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), terminable():
        del kept
        time.sleep(60)
    assert watching() is None and sys.unraisablehook is hook


def test_other_exceptions_there_are_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))
    kept = _Kept()
    watching = weakref.ref(kept, lambda _: 1 / 0)
    with terminable():
        del kept
    assert told == [ZeroDivisionError] and watching() is None
