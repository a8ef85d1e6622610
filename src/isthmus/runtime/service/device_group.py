"""The devices of one machine as one command. They start and stop together; a lost one does not stop the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from isthmus.errors import InternalError, IsthmusError


class GroupMember(Protocol):
    """An `Agent`."""

    def run(self) -> None: ...
    def stop(self) -> None: ...


def run_group(members: Mapping[str, GroupMember], log: Callable[[str], None]) -> None:
    """Until all have ended; whatever ends this thread ends them. Raises what the last of them ended with, if all ended
    by errors."""
    failed: dict[str, IsthmusError] = {}

    def live(name: str, member: GroupMember) -> None:
        try:
            member.run()
        except Exception as e:  # of any kind: nobody would hear of it
            failed[name] = e if isinstance(e, IsthmusError) else InternalError(f"{type(e).__name__}: {e}")
            if len(failed) < len(members):
                log(f"{name}: {failed[name]}; the other devices go on")

    threads = [
        threading.Thread(target=live, args=pair, name=f"device {pair[0]}", daemon=True) for pair in members.items()
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        for member in members.values():
            member.stop()
        for thread in threads:
            thread.join()
    if len(failed) == len(members):
        raise list(failed.values())[-1]
