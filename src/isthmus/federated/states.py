"""What clients keep between rounds: one safetensors file per client and round, in folders by hash.

    states/3f/a2/17-000012.safetensors      client 17, as it is after round 12

A file is named by the round that wrote it, so what an open round writes never touches what the last one left: to
abort a round is to forget it, and the coordinator's number per client says which file counts. So a file needs no
rename and no listing, and no folder is large: 65,536 of them hold 1e6 clients with about 15 files each.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from isthmus.errors import UserError

NEVER = -1
"""The round of a client that has kept nothing yet."""


class StateStore:
    """The states under one folder, for all executors of a machine: a client is at one of them at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, client: int, round_: int) -> Path:
        digest = hashlib.blake2b(client.to_bytes(8, "little"), digest_size=2).hexdigest()
        return self._folder / digest[:2] / digest[2:] / f"{client}-{round_:06d}.safetensors"

    def read(self, client: int, round_: int) -> dict[str, Tensor]:
        """The state that the client had after a round. UserError when it is not there or not whole."""
        path = self.path(client, round_)
        try:
            return load(path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"state {path}: missing: the folder is of another run") from None
        except (OSError, SafetensorError) as e:
            raise UserError(f"state {path}: cannot be read: {e}") from None

    def write(self, client: int, round_: int, state: Mapping[str, Tensor]) -> int:
        """Keep a state; returns its bytes. UserError for a state that is no dict of tensors, or a full disk."""
        for name, value in state.items():
            if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  a user's algorithm
                raise UserError(
                    f"algorithm: state {name!r} of client {client}: got {type(value).__name__}, expected a tensor"
                )
        path = self.path(client, round_)
        data = save({name: value.detach().contiguous() for name, value in state.items()})
        try:
            try:
                path.write_bytes(data)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        except OSError as e:
            raise UserError(f"state {path}: cannot be written: {e.strerror or e}") from None
        return len(data)

    def drop(self, entries: Iterable[tuple[int, int]]) -> None:
        """Remove the states of (client, round), those that are there."""
        for client, round_ in entries:
            with contextlib.suppress(FileNotFoundError):
                self.path(client, round_).unlink()

    def sweep(self, current: Mapping[int, int]) -> int:
        """Of these clients keep only the state of the given round; returns how many others were removed.

        For the clients of the rounds around a crash: all others have nothing to be removed.
        """
        removed = 0
        for client, round_ in current.items():
            kept = self.path(client, round_)
            for path in kept.parent.glob(f"{client}-*.safetensors"):
                if path != kept:
                    path.unlink()
                    removed += 1
        return removed
