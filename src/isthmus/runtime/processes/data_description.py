"""A process that opens data where a device would, describes the data, and ends. It does not import torch.

`python -m isthmus.runtime.processes.data_description` reads a question as JSON from standard input and writes the
answer to standard output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec

from isthmus.data import DataSpec
from isthmus.data.description import DataDescription, describe
from isthmus.data.registry import allowed
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.runtime.identity import Identity
from isthmus.runtime.identity.blinded_digests import ONE_OWNER, blinded
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.processes.memory import limit_memory

MOST_REASON = 500  # characters of an error message that are reported


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    data: DataSpec
    heldout: bool
    key: bytes  # the key of the digests
    kinds: tuple[str, ...] | None
    foreign: bool
    folder: str | None
    memory_bytes: int | None


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    description: DataDescription | None = None
    failure: str = ""


def data_key(identity: Path | None) -> bytes:
    """Under which a device conceals its data's fingerprints; `identity` is the folder with its key, if it has one."""
    return Identity(identity).data_key() if identity is not None else ONE_OWNER


def described_at(place: ProcessPlace, data: DataSpec, *, heldout: bool) -> DataDescription:
    """Return the description of its data by a device in that place. UserError for data that cannot be described, with
    the device's reason; PeerError for a process that was ended."""
    question = _Question(
        data=data,
        heldout=heldout,
        key=data_key(place.identity),
        kinds=place.data_kinds,
        foreign=place.identity is not None,
        folder=str(place.data) if place.data is not None else None,
        memory_bytes=place.memory_bytes,
    )
    command = [*place.prefix, sys.executable, *place.safety(), "-m", __name__]
    done = subprocess.run(command, input=msgspec.json.encode(question), stdout=subprocess.PIPE, check=False)
    try:
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except ValueError:  # it was ended before it answered
        raise PeerError(f"data: the process that opened them ended with code {done.returncode}") from None
    if answer.description is None:
        raise UserError(answer.failure)
    return answer.description


def _answered(question: _Question) -> _Answer:
    try:
        if question.folder is not None:
            os.chdir(question.folder)
        if question.memory_bytes is not None:
            limit_memory(question.memory_bytes)
        with allowed(question.data, question.kinds, foreign=question.foreign) as data:
            conceal = partial(blinded, key=question.key)
            return _Answer(description=describe(data, heldout=question.heldout, conceal=conceal))
    except Exception as e:  # of any kind: it is reported in one line at the coordinator
        reason = " ".join(str(e).split())
        text = reason if isinstance(e, IsthmusError) else f"{type(e).__name__}: {reason}"
        return _Answer(failure=text[:MOST_REASON])


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asked
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=_Question)
    answers = os.dup(1)
    os.dup2(2, 1)  # what data print is no answer
    answer = msgspec.json.encode(_answered(question))
    with open(answers, "wb") as file:
        file.write(answer)


if __name__ == "__main__":
    main()
