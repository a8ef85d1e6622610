"""How the ranks of an island find each other: under torchrun every rank runs `isthmus join`, and rank 0 is the device.

Rank 0's process for a run begins a session by writing its name into a private folder; the others look for a new name,
meet there through torch's FileStore, and compute until the session ends. (Rejected: a TCPStore, which listens on all
addresses.) Ranks on several machines need the folder on a file system that all of them see.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import secrets
import time
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec
import torch.distributed as dist

# Imported here, before there is a group: its functions take the one that there is then as a default, and keep it.
# Connections of a group that is kept stay open when it is destroyed, and other ranks notice nothing.
import torch.distributed.nn.functional  # noqa: F401  # pyright: ignore[reportUnusedImport]

from isthmus.accelerators import HOST, Accelerator
from isthmus.errors import RankLost, StepError, UserError
from isthmus.runtime.identity.files import private_folder, write_private
from isthmus.training.collectives import HOST_BACKEND, backends_for
from isthmus.training.faults import is_drivers
from isthmus.training.island import serve
from isthmus.training.ranks import Ranks

MEETING_S = 60.0  # how long ranks wait for each other at the beginning of a session
IDLE_S = 30 * 86400.0  # between two commands. Gloo notices a process that ends at once; a wait has no other end.
COLLECTIVE_S = 600.0
"""Seconds that an accelerator's own collectives may take, from the first rank that comes to the last: torch's
default."""
LOOK_S = 0.2
_CURRENT = "current"


class Island(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's place in it."""

    folder: Path  # where ranks meet
    rank: int
    count: int
    local: int  # ranks on this machine
    number: int = 0  # the number of this rank among those


def island_here(state: Path) -> Island | None:
    """The one that torchrun has put this process into; None without it. UserError for a broken environment."""
    if "WORLD_SIZE" not in os.environ:
        return None
    try:
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
        rank, count, local, number = (int(os.environ[n]) for n in names)
    except (KeyError, ValueError) as e:
        raise UserError(f"WORLD_SIZE is set without {e}: start `isthmus join` by torchrun, or unset it") from None
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    name = str(os.getppid()) if run == "none" else "".join(c for c in run if c.isalnum())
    return Island(folder=private_folder(state) / f"island-{name}", rank=rank, count=count, local=local, number=number)


def begin_session(folder: Path, count: int, accelerator: Accelerator = HOST) -> Ranks:
    """On rank 0, one at a time. RuntimeError when the others do not come."""
    private_folder(folder)
    name = secrets.token_hex(8)
    write_private(folder / _CURRENT, name.encode())
    return _met(folder, name, 0, count, accelerator)


def end_session(ranks: Ranks) -> None:
    """On rank 0. Ranks that are gone are not missed, and those that wait for a collective hear nothing else."""
    with contextlib.suppress(RankLost):
        if not ranks.broken:
            ranks.end()
    dist.destroy_process_group()


def attend(
    island: Island, send: Callable[[str], None], *, accelerator: Accelerator = HOST, sessions: float = math.inf
) -> None:
    """On the other ranks: one session after another, for as long as the process lives, or so many."""
    private_folder(island.folder)
    last, done = "", 0
    while done < sessions:
        name = _current(island.folder)
        if name == last:
            time.sleep(LOOK_S)
            continue
        last, done = name, done + 1
        send(f"rank {island.rank} of {island.count} is at work")
        try:
            with _session(island, name, accelerator) as ranks:
                serve(ranks)
        except (RankLost, StepError, RuntimeError, MemoryError) as e:
            send(f"rank {island.rank}: {' '.join(str(e).split())[:200]}")
            if is_drivers(e):  # nothing can be computed in this process any more
                raise


@contextlib.contextmanager
def _session(island: Island, name: str, accelerator: Accelerator) -> Generator[Ranks]:
    ranks = _met(island.folder, name, island.rank, island.count, accelerator)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _current(folder: Path) -> str:
    try:
        return (folder / _CURRENT).read_text()
    except FileNotFoundError:
        return ""


def _met(folder: Path, name: str, rank: int, count: int, accelerator: Accelerator) -> Ranks:
    if os.environ.get("LOCAL_WORLD_SIZE", str(count)) == str(count):
        for library in ("GLOO", "NCCL"):  # all are on this machine: nothing listens beyond it
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / name), count)
    store.set_timeout(datetime.timedelta(seconds=MEETING_S))
    dist.init_process_group(
        backends_for(accelerator.device.type),
        store=store,
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=IDLE_S),
    )
    _bound_collectives(accelerator)
    return Ranks(store, accelerator)


def _bound_collectives(accelerator: Accelerator) -> None:
    """Bound the time of the collectives of an accelerator's own backend, whose ranks do not notice one that ends. They
    meet in work that all of them have received, and wait for orders over Gloo, which notices."""
    if backends_for(accelerator.device.type) != HOST_BACKEND and dist.group.WORLD is not None:
        # torch has no public name for either
        backend = dist.group.WORLD._get_backend(accelerator.device)  # pyright: ignore[reportPrivateUsage]
        if (bound := getattr(backend, "_set_default_timeout", None)) is not None:
            bound(datetime.timedelta(seconds=COLLECTIVE_S))
