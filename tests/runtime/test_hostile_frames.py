"""What a hostile party sends: refused in our own words, before it costs memory."""

from __future__ import annotations

import contextlib
import socket
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import PeerError
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.run import Heartbeat
from isthmus.runtime.transport import channel as channel_module
from isthmus.runtime.transport.channel import (
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX,
    VERSION,
)
from isthmus.training.layout import TensorHeader

from .channel_cases import Implementation, every, parcel, wire


def prefix(header_bytes: int, payload_bytes: int = 0, magic: bytes = MAGIC, version: int = VERSION) -> bytes:
    return PREFIX.pack(magic, version, header_bytes, payload_bytes)


def raw_frame(header: object, payload_bytes: int = 0) -> bytes:
    encoded = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    return prefix(len(encoded), payload_bytes) + encoded


def raw_parcel(payload_bytes: int, **tensor: object) -> bytes:
    whole = {"name": "x", "dtype": "int8", "shape": [4], "stride": [1], **tensor}
    body = {"type": "Arrived", "parcel": "forward", "source": 0, "item": 0}
    fields = {"type": "ToPeer", "run": "r", "body": body, "tensors": [whole]}
    return raw_frame(fields, payload_bytes)


def raw_report(kind: str, **fields: object) -> bytes:
    return raw_frame({"type": "ToCoordinator", "run": "r", "body": {"type": kind, **fields}})


CREDIT = {"type": "Credit", "run": "r", "size_bytes": 1}


def nested(depth: int) -> object:
    """An assignment with an argument list so deep that no decoder follows."""
    deep = b"\x92\xa4list\x91" * depth + b"\xc0"
    op = {"name": "o", "kind": "operator", "target": "t", "args": [msgspec.Raw(deep)]}
    return {"type": "AssignMessage", "run": "r", "assignment": {"train": {"index": 0, "ops": [op]}}}


UNEVEN = {"times_s": [0], "latency_s": [], "bandwidth_bytes_per_s": [1]}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "another protocol": (b"GET / HTTP/1.1\r\nHost: x\r\n", "sent b'GET ', expected a frame that starts with b'ISTH'"),
    "another version": (prefix(9, version=2), "frame version 2, expected 1"),
    "header too long": (prefix(MAX_HEADER_BYTES + 1), rf"frame of {MAX_HEADER_BYTES + 1} \+ 0 bytes, expected at most"),
    "payload too long": (prefix(9, MAX_PAYLOAD_BYTES + 1), rf"frame of 9 \+ {MAX_PAYLOAD_BYTES + 1} bytes"),
    "everything too long": (b"ISTH\x01" + b"\xff" * 15, rf"frame of {2**32 - 1} \+ {2**64 - 1} bytes"),
    "no header": (prefix(0), "header is not a known message"),
    "not msgpack": (raw_frame(b"\xc1\xc1"), "header is not a known message: MessagePack"),
    "more than a header": (raw_frame(msgspec.msgpack.encode(CREDIT) + b"\x01"), "header is not a known message"),
    "a compressed bomb": (raw_frame(zlib.compress(bytes(MAX_HEADER_BYTES + 2))), "truncated or of more than 4194304 b"),
    "compressed, truncated": (raw_frame(zlib.compress(msgspec.msgpack.encode(CREDIT))[:-1]), "compressed, and truncat"),
    "compressed, and more": (
        raw_frame(zlib.compress(msgspec.msgpack.encode(CREDIT)) + b"x"),
        "compressed, and truncat",
    ),
    "not a map": (raw_frame([1, 2]), "Expected `object`, got `array`"),
    "no tag": (raw_frame({"run": "r"}), "missing required field `type`"),
    "unknown tag": (raw_frame({"type": "Bad\nnews", "run": "r"}), "Invalid value 'Bad news'"),
    "not UTF-8": (raw_frame(b"\x82\xa4type\xa9Heartbeat\xa3run\xa2\xff\xff"), "is not a known message: .*(?i:utf-8)"),
    "missing field": (raw_frame({"type": "Credit", "run": "r"}), "missing required field `size_bytes`"),
    "unknown field": (raw_frame(CREDIT | {"extra": 1}), "unknown field `extra`"),
    "wrong type": (raw_frame(CREDIT | {"size_bytes": "many"}), "Expected `int`, got `str`"),
    "negative credit": (raw_frame(CREDIT | {"size_bytes": -1}), "Expected `int` >= 0"),
    "a sender in the body": (raw_report("DeviceReady", device="oslo"), r"unknown field `device` - at `\$.body`"),
    "a body of another direction": (raw_report("Pause"), r"Invalid value 'Pause' - at `\$.body.type`"),
    "a negative step": (raw_report("StateReceived", number=1, of="d", step=-1), "Expected `int` >= 0"),
    "a negative transfer": (raw_report("TransferEnded", number=-1), "Expected `int` >= 0"),
    "a long note": (raw_report("DeviceReady", notes=["x" * 401]), "Expected `str` of length <= 400"),
    "too deep": (raw_frame(nested(100_000)), "maximum recursion depth"),
    "field that refuses itself": (
        raw_frame(
            {
                "type": "AssignMessage",
                "run": "r",
                "assignment": {
                    "neighbours": [
                        {
                            "stage": 0,
                            "device": "d",
                            "host": "h",
                            "port": 1,
                            "shape": {"latency_s": 0, "bandwidth_bytes_per_s": 1, "trace": UNEVEN},
                        }
                    ]
                },
            }
        ),
        "header is not a known message: link trace",
    ),
    "payload without tensors": (raw_frame(CREDIT, 5), "frame payload of 5 bytes, its header announces 0"),
    "payload too short": (raw_parcel(3), "frame payload of 3 bytes, its header announces 4"),
    "payload missing": (raw_parcel(0, shape=[2**40]), f"frame payload of 0 bytes, its header announces {2**40}"),
    "unknown dtype": (raw_parcel(4, dtype="object"), "tensor 'x': unknown dtype 'object', expected one of: bfloat16"),
    "negative size": (raw_parcel(4, shape=[-4]), r"Expected `int` >= 0 - at `\$.tensors\[0\].shape\[0\]`"),
    "negative stride": (raw_parcel(4, stride=[-1]), r"Expected `int` >= 0 - at `\$.tensors\[0\].stride\[0\]`"),
    "overflowing shape": (raw_parcel(0, shape=[2**32, 2**32], stride=[0, 0]), "beyond any memory"),
    "overflow to nothing": (raw_parcel(0, shape=[0, 2**60], stride=[1, 1], dtype="int64"), "beyond any memory"),
    "absurd stride": (raw_parcel(4, stride=[2**40]), r"stride \(1099511627776,\) spreads its elements too far"),
    "stride missing": (raw_parcel(4, stride=[]), "tensor 'x': 1 sizes and 0 strides"),
    "endless name": (raw_parcel(4, name="\n" * 60_000, stride=[2**60]), "tensor '.*': shape"),
}


@every
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_frame_is_refused_before_it_costs_memory(
    kind: Implementation, case: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_allocate(header: TensorHeader) -> None:
        raise AssertionError(f"memory for {header.nbytes} bytes")

    monkeypatch.setattr(channel_module, "receive_buffer", refuse_to_allocate)
    sent, expected = HOSTILE[case]
    with kind.against_raw() as (channel, mallory):
        writing = pool.submit(mallory.sendall, sent)
        with pytest.raises(PeerError, match=expected) as caught:
            channel.receive()
        channel.close()
        with contextlib.suppress(OSError):
            writing.result(20)
    message = str(caught.value)
    assert message.startswith("mallory: ")
    assert "\n" not in message and len(message) < 400


@every
def test_a_length_that_is_refused_is_not_allocated(kind: Implementation) -> None:
    with kind.against_raw() as (channel, mallory):
        mallory.sendall(prefix(MAX_HEADER_BYTES + 1))
        tracemalloc.start()
        try:
            with pytest.raises(PeerError):
                channel.receive()
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


@every
def test_a_guard_refuses_before_memory_is_spent(kind: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    def guard(message: AnyMessage) -> None:
        if not isinstance(message, Heartbeat):
            raise PeerError(f"{type(message).__name__} is not expected")

    def refuse_to_allocate(header: TensorHeader) -> None:
        raise AssertionError(f"memory for {header.nbytes} bytes")

    monkeypatch.setattr(channel_module, "receive_buffer", refuse_to_allocate)
    with kind.against_raw() as (channel, mallory):
        mallory.sendall(wire(Heartbeat(run="r")) + raw_parcel(4))
        assert channel.receive(guard) == (Heartbeat(run="r"), [])
        with pytest.raises(PeerError, match=r"^mallory: ToPeer is not expected$"):
            channel.receive(guard)


@every
def test_a_payload_that_never_comes_is_the_senders_fault(kind: Implementation) -> None:
    with kind.against_raw(timeout_s=0.2) as (channel, mallory):
        mallory.sendall(raw_parcel(1 << 39, shape=[1 << 39]))
        with pytest.raises(PeerError, match=f"^mallory: (stalled .* {1 << 39} bytes short|tensor 'x': no memory)"):
            channel.receive()


def drained(kind: Implementation, sent: bytes) -> list[AnyMessage]:
    """What a channel makes of these bytes until it refuses them or they end."""
    found: list[AnyMessage] = []
    with kind.against_raw() as (channel, mallory):
        writing = threading.Thread(target=lambda: (mallory.sendall(sent), mallory.shutdown(socket.SHUT_WR)))
        writing.start()
        with contextlib.suppress(PeerError):
            while (got := channel.receive()) is not None:
                found.append(got[0])
        writing.join(60)
    return found


@every
@given(
    sent=st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=100).map(raw_frame),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        ).map(raw_frame),
    )
)
def test_random_bytes_are_refused_in_our_own_words(kind: Implementation, sent: bytes) -> None:
    assert drained(kind, sent) == []


TENSORS = [torch.randn(3, 4).t(), torch.randn(2, 6)[:, ::2], torch.ones(1, 2).expand(2, 2), torch.empty(0)]
VALID = wire(parcel(3, *TENSORS), TENSORS)


@every
@given(changes=st.dictionaries(st.integers(0, len(VALID) - 1), st.integers(0, 255), max_size=4))
def test_a_corrupted_frame_is_refused_in_our_own_words(kind: Implementation, changes: dict[int, int]) -> None:
    sent = bytearray(VALID)
    for at, byte in changes.items():
        sent[at] = byte
    found = drained(kind, bytes(sent))
    assert len(found) <= 1
    assert found or bytes(sent) != VALID
