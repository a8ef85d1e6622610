"""Which line of Python an access comes from, without the lines of torch and of the emulation itself."""

from __future__ import annotations

import os
import sys

import torch

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
