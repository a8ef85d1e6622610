"""The name of an accelerator and the size of its memory, found out in a process of its own.

Asking a driver makes a context in the process that asks, which takes hundreds of megabytes of a GPU's memory for as
long as it lives; an agent lives for weeks. `python -m isthmus.runtime.service.hardware NAME...` prints JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from isthmus.accelerators import HOST, open_accelerator
from isthmus.errors import UserError

ANSWER_S = 120.0


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    accelerator: str  # as `open_accelerator` takes it
    name: str = ""
    total_bytes: int = 0  # bytes of its memory
    error: str = ""  # why it cannot be used; else it can

    @property
    def label(self) -> str:
        """For people: the hardware, and which one of the machine's."""
        return f"{self.name} ({self.accelerator})"


def hardware_of(names: Sequence[str], field: str) -> list[Hardware]:
    """Return the hardware of accelerators with full names. UserError, in which `field` is the field that asked for it,
    for one that cannot be used."""
    asked = [name for name in dict.fromkeys(names) if name != "cpu"]
    known = {found.accelerator: found for found in (_asked(asked) if asked else [])}
    if "cpu" in names:
        known["cpu"] = _described("cpu")
    for found in known.values():
        if found.error:
            raise UserError(f"{field}: {found.accelerator}: {found.error}")
    return [known[name] for name in names]


def _asked(names: Sequence[str]) -> list[Hardware]:
    command = [sys.executable, "-P", "-m", "isthmus.runtime.service.hardware", *names]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ANSWER_S, check=True, env=dict(os.environ))
        return msgspec.json.decode(done.stdout, type=list[Hardware])
    except subprocess.CalledProcessError as e:
        last = e.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"accelerators {', '.join(names)}: cannot be queried: {last[:500]}") from None
    except (subprocess.SubprocessError, OSError, ValueError) as e:
        raise UserError(f"accelerators {', '.join(names)}: cannot be queried: {type(e).__name__}: {e}") from None


def _described(name: str) -> Hardware:
    try:
        found = HOST if name == "cpu" else open_accelerator(name)
        return Hardware(accelerator=name, name=found.name, total_bytes=found.memory().total)
    except Exception as e:  # whatever its driver says
        return Hardware(accelerator=name, error=" ".join(str(e).split())[:500] or type(e).__name__)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode([_described(name) for name in sys.argv[1:]]))
