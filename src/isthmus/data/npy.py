"""Arrays in numpy's format, of files that anybody wrote: a header may claim more than there is."""

from __future__ import annotations

import math
from typing import BinaryIO

import numpy as np

from isthmus.data.dataset import Array

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Readers by version; the third version is for names of fields, which numbers have not."""


def read_npy(opened: BinaryIO, size_bytes: int) -> Array:
    """The array in the next `size_bytes`. ValueError for what is none, and for a header that claims more: it costs no
    memory."""
    begin = opened.tell()
    version = np.lib.format.read_magic(opened)
    if version not in _HEADERS:
        raise ValueError(f"got version {version} of numpy's format, expected 1.0 or 2.0")
    shape, _, dtype = _HEADERS[version](opened)
    claimed, there = math.prod(shape) * dtype.itemsize, size_bytes - (opened.tell() - begin)
    if claimed != there and not dtype.hasobject:  # numpy refuses objects below
        raise ValueError(f"its header claims {claimed} bytes, there are {there}")
    opened.seek(begin)
    return np.lib.format.read_array(opened, allow_pickle=False)
