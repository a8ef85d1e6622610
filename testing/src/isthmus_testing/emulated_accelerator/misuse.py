"""The error of the emulated accelerator for wrong use of streams or host memory, and the line of Python that it
names."""

from __future__ import annotations

import os
import sys

import torch

from isthmus.errors import InternalError


class Misuse(InternalError):
    """A mistake that would give wrong numbers on hardware, but not every time. `FOUND` keeps it, even if a caller
    catches it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        FOUND.append(self)


FOUND: list[Misuse] = []


class DataRace(Misuse):
    """Two streams access one tensor, at least one of them writes, and nothing gives them an order."""


class HostBufferInUse(Misuse):
    """The host wrote to a host buffer before the copy that reads or writes it was done."""


class FreedTooEarly(Misuse):
    """A tensor was dropped while a stream that had not said `used_here` worked with it: its memory may have another
    owner by then."""


class RefusedWait(Misuse):
    """An implicit copy, or a wait of the host, where there must be none."""


_NOT_THEIRS = (os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep, "<")


def caller() -> tuple[str, int, str]:
    """(file, line, function) of the innermost frame that is not of the machinery."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THEIRS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def shown(place: tuple[str, int, str]) -> str:
    file, line, function = place
    return f"{os.sep.join(file.split(os.sep)[-2:])}:{line} in {function}"
