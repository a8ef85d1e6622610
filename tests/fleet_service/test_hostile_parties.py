"""One who has joined, and sends what nobody would: it costs little, and is named once."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import socket
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.errors import PeerError
from isthmus.protocol.run_messages import ItemReported
from isthmus.runtime.coordinator.backend import RunRequest
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import DevicePresent, JoinRequest, NewDevice, ProcessEnded, Renew
from isthmus.runtime.messages.run import Credit, Heartbeat, Hello, JoinRun, ToCoordinator
from isthmus.runtime.messages.versions import versions_here
from isthmus.runtime.service.agent import join_fleet
from isthmus.runtime.transport.acceptor import Acceptor, Rate, RateLimit
from isthmus.runtime.transport.channel import MAX_HEADER_BYTES, PREFIX, SocketChannel, dial, frame
from isthmus.training.layout import TensorHeader, pack
from tests.runtime.channel_cases import parcel

from .parties import Fleet, soon

FUZZED_FRAMES = int(os.environ.get("ISTHMUS_FUZZED_FRAMES", "20000"))
FORGOTTEN_BYTES = 8 << 20
"""How much more memory this process may have after all of them: freed memory is not all given back."""
TINY = TensorHeader("a", "bool", (1,), (1,))


class Recorded:
    """A connection on which these bytes come, and then the end."""

    family = socket.AF_UNIX

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def recv_into(self, buffer: memoryview) -> int:
        size = min(buffer.nbytes, self._data.nbytes)
        buffer[:size] = self._data[:size]
        self._data = self._data[size:]
        return size

    def sendmsg(self, pieces: Sequence[memoryview]) -> int:
        raise OSError(errno.EPIPE, "nobody reads")

    def dup(self) -> Recorded:
        return self

    def settimeout(self, timeout_s: float | None) -> None: ...
    def setsockopt(self, level: int, name: int, value: int) -> None: ...
    def shutdown(self, how: int) -> None: ...
    def close(self) -> None: ...


def _received(data: bytes) -> None:
    """Whatever it is, it is a frame, the end, or a PeerError."""

    def guard(message: AnyMessage) -> None:
        if sum(t.nbytes for t in message.tensors) > 1 << 16:
            raise PeerError("not of the plan")

    channel = SocketChannel(Recorded(data), "mallory", 1.0)
    try:
        while channel.receive(guard) is not None:
            pass
    except PeerError as e:
        assert str(e).startswith("mallory: ") and len(str(e)) < 2000


def _honest() -> list[bytes]:
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(float("nan")), torch.zeros(0)]
    messages: list[AnyMessage] = [
        Hello(run="r", stage=1),
        Heartbeat(run="r"),
        Credit(run="r", size_bytes=7),
        Renew(run="", request=b"x" * 50),
        DevicePresent(run="", versions=versions_here()),
        JoinRun(run="r", device="d", host="h", port=1),
        ToCoordinator(run="r", body=ItemReported(item=3, loss=1.0)),
    ]
    return [b"".join(frame(m, [])) for m in messages] + [
        b"".join(frame(parcel(1, *tensors), [pack(t) for t in tensors]))
    ]


def _mutated(draw: random.Random, honest: Sequence[bytes]) -> bytes:
    data = bytearray(draw.choice(honest))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data))
        match draw.randrange(5):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at : at + 1] = draw.randbytes(draw.randrange(6))
            case 2:
                del data[at : at + draw.randrange(1, 9)]
            case 3:
                data[at:at] = struct.pack(">I", draw.choice((0, 1, 1 << 20, (1 << 32) - 1)))
            case _:
                data += draw.choice(honest)
        if not data:
            break
    header_bytes = len(data) - PREFIX.size
    if header_bytes > 0 and draw.random() < 0.5:  # else most end at a length that does not fit
        data[8:12] = struct.pack(">I", draw.choice((header_bytes, max(0, header_bytes - 28))))
    return bytes(data)


def test_fuzzed_frames_end_in_a_frame_or_an_error() -> None:
    draw, honest, before_bytes = random.Random(0), _honest(), 0
    for data in honest:
        _received(data)
    for number in range(FUZZED_FRAMES):
        _received(_mutated(draw, honest))
        if number == FUZZED_FRAMES // 10:
            before_bytes = _resident_bytes()
    assert _resident_bytes() - before_bytes < FORGOTTEN_BYTES


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_fuzzed_join_frames_are_refused() -> None:
    draw = random.Random(1)
    good = msgspec.msgpack.encode(JoinRequest(b"s" * 16, (NewDevice("desk", b"r" * 250),), versions_here()))
    decoder = msgspec.msgpack.Decoder(JoinRequest)
    for _ in range(FUZZED_FRAMES // 10):
        data = bytearray(good)
        for _ in range(draw.randint(1, 5)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


def test_many_tiny_tensors_cost_little_memory() -> None:
    def sent(count: int) -> bytes:
        header = msgspec.msgpack.encode(msgspec.structs.replace(parcel(), tensors=(TINY,) * count))
        return PREFIX.pack(b"ISTH", 1, len(header), count) + header

    per_tensor = len(sent(1000)) / 1000
    quarter = int(MAX_HEADER_BYTES / per_tensor / 4)  # the most that pass would take four times as long
    for count, refused in ((400_000, f"expected at most {MAX_HEADER_BYTES}"), (quarter, "not of the plan")):
        data = sent(count)

        def guard(message: AnyMessage) -> None:
            raise PeerError("not of the plan")

        channel = SocketChannel(Recorded(data), "mallory", 1.0)
        tracemalloc.start()
        with pytest.raises(PeerError, match=refused):
            channel.receive(guard)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes <= (64 << 20) / 4


def test_an_allowance() -> None:
    allowance = RateLimit(Rate(per_s=8.0, burst=3.0))
    for now_s in (100.0, 100.0, 100.0, 100.125, 100.25):
        allowance.spend(now_s)
    with pytest.raises(PeerError, match="more than 8 messages a second"):
        allowance.spend(100.25)


def _flood(channel: SocketChannel) -> None:
    for _ in range(10_000):
        channel.send(Heartbeat(run=""))


def _tensors(channel: SocketChannel) -> None:
    tensor = torch.zeros(10)
    channel.send(parcel(0, tensor), [pack(tensor)])


def _length(channel: SocketChannel) -> None:
    channel.send_chunk(memoryview(PREFIX.pack(b"ISTH", 1, 10, 1 << 40) + bytes(10)))


def _present(fleet: Fleet, folder: Path) -> SocketChannel:
    """The connection of a device that has joined, of the folder's name."""
    join_fleet(fleet.ticket(), {folder.name: folder}, 5.0)
    channel = dial(
        "127.0.0.1",
        fleet.service.port,
        "coordinator",
        5.0,
        identity=Identity(folder),
        expected=Party("coordinator", ""),
    )
    channel.send(DevicePresent(run="", versions=versions_here()))
    soon(lambda: fleet.service.present)
    return channel


@pytest.mark.parametrize(
    ("attack", "words"),
    [(_flood, "messages a second"), (_tensors, "sent ToPeer"), (_length, "not a known message")],
)
def test_one_who_has_joined_is_shut_out_and_named_once(
    fleet: Fleet, tmp_path: Path, attack: Callable[[SocketChannel], None], words: str
) -> None:
    channel = _present(fleet, tmp_path / "mallory")
    with contextlib.suppress(PeerError):  # shut out in the middle of it
        attack(channel)
    soon(lambda: not fleet.service.present)
    soon(lambda: any(words in line for line in fleet.said))
    assert sum("mallory" in line and words in line for line in fleet.said) == 1
    channel.close()


def test_how_a_process_ended_steers_no_terminal(fleet: Fleet, tmp_path: Path) -> None:
    channel = _present(fleet, tmp_path / "mallory")
    call = RunRequest(run="secret", devices=("mallory",), timeout_s=5.0, threads=1, logs=tmp_path)
    acceptor = Acceptor(call.run, call.devices, on_message=lambda _: None, guard=lambda *_: None, timeout_s=5.0)
    with fleet.service.at_work(call, acceptor) as devices:
        channel.send(ProcessEnded(run=call.run, how="well\x1b[2J\nindeed"))
        soon(devices.ended)
        assert devices.ended() == {"mallory": "well [2J indeed"}
    channel.close()
