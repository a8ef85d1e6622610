"""Clients' states that a committed round needs, in one file beside it: with both a run goes on on another machine.

    rounds/round-000010.safetensors   rounds/round-000010.states

States lie in places that are written over. The file has them in the order of their places, as they lie on disk: each
says whose it is, with a digest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from isthmus.errors import UserError
from isthmus.federated.server import STATES
from isthmus.federated.state_files import StateFiles
from isthmus.run_files import PACKED

AT_ONCE_BYTES = 16 << 20


def packed_beside(round_file: Path) -> Path:
    return round_file.with_suffix(PACKED)


def pack_states(round_file: Path, folder: Path, size_bytes: int, target: Path) -> None:
    """Write the states that a committed round needs; `folder` has those of the run, of up to `size_bytes`. OSError,
    also where one is missing."""
    with safe_open(round_file, framework="np") as file:
        places = _needed(file.get_tensor(STATES))
    files = StateFiles(str(folder), size_bytes, direct=False)
    with target.open("wb") as packed:
        for some in _parts(places, files.each_bytes):
            memory = files.accumulator(len(some))
            files.read(some, memory)
            packed.write(memory.data)


def unpack_states(round_file: Path, folder: Path, size_bytes: int, states: NDArray[np.int32]) -> None:
    """Put the states of a round that came from elsewhere where they lie, and remove their file; nothing where there is
    none. UserError for a file that is not whole, a full disk."""
    packed, places = packed_beside(round_file), _needed(states)
    if not packed.is_file():
        return
    files = StateFiles(str(folder), size_bytes, direct=False)
    try:
        if (got := packed.stat().st_size) != (expected := len(places) * files.each_bytes):
            raise UserError(f"{packed}: got {got} bytes of clients' states, expected {expected}")
        with packed.open("rb") as file:
            for some in _parts(places, files.each_bytes):
                memory = files.accumulator(len(some))
                file.readinto(memory.reshape(-1).data)
                files.write(some, memory)
        packed.unlink()
    except OSError as e:
        raise UserError(f"{packed}: clients' states cannot be read or written: {e.strerror or e}") from None


def needs_states(round_file: Path) -> bool:
    """Return whether a committed round is one of clients that keep something; False for a damaged one."""
    try:
        with safe_open(round_file, framework="np") as file:
            return STATES in file.keys()  # noqa: SIM118  not a dict
    except (OSError, SafetensorError):
        return False


def _needed(states: NDArray[np.int32]) -> list[int]:
    return sorted(states[states >= 0].tolist())


def _parts(places: list[int], each_bytes: int) -> list[list[int]]:
    """Not more at a time than memory should hold."""
    count = max(1, AT_ONCE_BYTES // each_bytes)
    return [places[begin : begin + count] for begin in range(0, len(places), count)]
