"""The lab is right if TCP sees the links that the fleet states, and if nothing of it can be found afterwards."""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import InternalError, UserError
from isthmus.fleet import Device, Fleet, Link, Links, Route
from isthmus_testing.lab import Lab, lab_unavailable, measure
from isthmus_testing.lab.__main__ import main
from isthmus_testing.lab.hub import PathSpec, ShapedPath, mac_address, wire_size
from tests.tiers import represented_by

from ..quiet import when_quiet

MBIT = 1e6 / 8
PAYLOAD_SHARE = 1448 / 1514

LINKS = {
    ("a", "b"): Link(0.050, 100 * MBIT),
    ("b", "a"): Link(0.050, 20 * MBIT),
    ("a", "c"): Link(0.001, 1000 * MBIT),
    ("c", "a"): Link(0.005, 200 * MBIT),
    ("b", "c"): Link(0.010, 50 * MBIT),
    ("c", "b"): Link(0.010, 50 * MBIT),
}


def fleet(*names: str) -> Fleet:
    devices = tuple(Device(name=name, region="r", flops_per_s=1e12, memory_bytes=1 << 30) for name in names)
    routes = tuple(Route(*pair, link) for pair, link in LINKS.items() if set(pair) <= set(names))
    return Fleet(name="test", devices=devices, links=Links(default=Link(0.001, 100 * MBIT), devices=routes))


@pytest.fixture(scope="module")
def host() -> None:
    if reason := lab_unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def lab(host: None) -> Iterator[Lab]:
    with Lab(fleet("a", "b", "c")) as lab:
        yield lab


def run(lab: Lab, place: str, *program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*lab.command(place), *program], capture_output=True, text=True, timeout=30)


def hub_pid(lab: Lab) -> int:
    found = re.search(r"/proc/(\d+)/fd/", " ".join(lab.command("coordinator")))
    assert found is not None
    return int(found[1])


def has_ended(process: int) -> bool:
    try:
        watch = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], 10)[0])
    finally:
        os.close(watch)


def processes_in(namespace: str) -> list[str]:
    inside: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if os.readlink(entry) == namespace:
                inside.append(entry.parts[2])
        except OSError:
            continue
    return inside


# The schedule of one path, without any network


def shaped(latency_s: float, rate: float | None, limit: float | None = math.inf) -> ShapedPath:
    return ShapedPath(
        PathSpec(source=0, target=1, latency_s=latency_s, bandwidth_bytes_per_s=rate, queue_limit_bytes=limit)
    )


def test_frames_leave_one_after_the_other_and_then_travel() -> None:
    path = shaped(0.5, 1000.0)
    assert path.admit(10.0, 1, 100) == pytest.approx(10.6)
    assert path.admit(10.0, 1, 200) == pytest.approx(10.8)  # waits for the first
    assert path.admit(12.0, 1, 100) == pytest.approx(12.6)  # the transmitter has been idle


def test_a_frame_is_dropped_when_the_queue_before_it_exceeds_the_limit() -> None:
    path = shaped(0.0, 1000.0, limit=250.0)
    dues = [path.admit(0.0, 2, 100) for _ in range(5)]
    assert dues == [pytest.approx(0.1), pytest.approx(0.2), pytest.approx(0.3), None, None]
    count = path.count()
    assert (count.packets, count.wire_bytes, count.drops) == (6, 300, 4)


def test_a_path_without_limit_delivers_at_once() -> None:
    path = shaped(0.0, None, limit=None)
    assert [path.admit(7.0, 1, 1 << 16) for _ in range(1000)] == [7.0] * 1000


@given(
    gaps=st.lists(st.floats(0, 2), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 10_000), min_size=30, max_size=30),
)
def test_no_interval_carries_more_than_the_rate(gaps: list[float], sizes: list[int]) -> None:
    path, now_s = shaped(0.25, 1e4), 0.0
    due_s: list[float] = []
    for gap, size in zip(gaps, sizes, strict=False):
        now_s += gap
        due = path.admit(now_s, 1, size)
        assert due is not None and due >= now_s + 0.25 + size / 1e4 - 1e-9
        due_s.append(due)
    for first in range(len(due_s)):
        for last in range(first + 1, len(due_s)):
            sent_bytes = sum(sizes[first + 1 : last + 1])
            assert sent_bytes <= 1e4 * (due_s[last] - due_s[first]) + 1e-6


def frame(gso_type: int, gso_size: int, payload: int, transport_header: bytes) -> bytes:
    vnet = struct.pack("=BBHHHH", 1, gso_type, 0, gso_size, 34, 16)
    return vnet + bytes(34) + transport_header + bytes(payload)


TCP_HEADER = bytes(12) + bytes([8 << 4]) + bytes(19)  # 8 words: with timestamps


@pytest.mark.parametrize(
    ("gso_type", "gso_size", "payload", "header", "packets"),
    [
        pytest.param(0, 0, 1448, TCP_HEADER, 1, id="one segment"),
        pytest.param(1, 1448, 3 * 1448, TCP_HEADER, 3, id="whole segments"),
        pytest.param(1, 1448, 3 * 1448 + 1, TCP_HEADER, 4, id="a short last segment"),
        pytest.param(0x81, 1448, 2 * 1448, TCP_HEADER, 2, id="ECN"),
        pytest.param(5, 1000, 2500, bytes(8), 3, id="UDP"),
    ],
)
def test_wire_size_counts_the_headers_of_every_segment(
    gso_type: int, gso_size: int, payload: int, header: bytes, packets: int
) -> None:
    expected = payload + packets * (34 + len(header))
    assert wire_size(frame(gso_type, gso_size, payload, header)) == (packets, expected)


def test_mac_address_is_locally_administered_and_unicast() -> None:
    assert mac_address("10.99.0.7") == bytes([0x02, 0, 10, 99, 0, 7])


# What a lab refuses


def test_a_device_may_not_be_named_coordinator() -> None:
    with pytest.raises(UserError, match="coordinator"):
        Lab(fleet("a", "coordinator"))


def test_a_fleet_must_fit_into_one_network() -> None:
    assert len(Lab(fleet(*(f"d{i}" for i in range(253)))).addresses) == 254
    with pytest.raises(UserError, match="254 devices"):
        Lab(fleet(*(f"d{i}" for i in range(254))))


def test_a_lab_that_is_not_entered_has_no_commands() -> None:
    with pytest.raises(InternalError, match="not running"):
        Lab(fleet("a", "b")).command("a")


# Accuracy: this is what the lab is for, so here time is asserted, over medians and generously


@pytest.mark.parametrize(
    ("source", "target"), represented_by([("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")], ("b", "a"))
)
@when_quiet
def test_delay_and_throughput_are_the_fleet_s(lab: Lab, source: str, target: str) -> None:
    link = LINKS[source, target]
    found = measure(lab, source, target, 3.0)
    assert found.delay_s == pytest.approx(link.latency_s, abs=0.003)
    assert found.delay_s >= link.latency_s
    payload = lab.payload_bandwidth_bytes_per_s(source, target)
    assert payload == pytest.approx(link.bandwidth_bytes_per_s * PAYLOAD_SHARE)
    assert found.payload_bytes_per_s == pytest.approx(payload, rel=0.1)
    assert lab.statistics().overflows == 0


@when_quiet
def test_links_with_the_coordinator_are_not_shaped(lab: Lab) -> None:
    found = measure(lab, "b", "coordinator", 1.0)
    assert found.delay_s < 0.003
    assert found.payload_bytes_per_s > 2 * LINKS["b", "a"].bandwidth_bytes_per_s
    assert lab.payload_bandwidth_bytes_per_s("b", "coordinator") == math.inf


@pytest.mark.long
@when_quiet
def test_links_with_the_coordinator_can_be_shaped(host: None) -> None:
    with Lab(fleet("a", "b"), coordinator_link=Link(0.030, 20 * MBIT)) as lab:
        found = measure(lab, "coordinator", "a", 1.5)
    assert found.delay_s == pytest.approx(0.030, abs=0.003)
    assert found.payload_bytes_per_s == pytest.approx(20 * MBIT * PAYLOAD_SHARE, rel=0.1)


def test_statistics_count_what_is_on_the_wire(host: None) -> None:
    with Lab(fleet("a", "b", "c")) as lab:
        before = lab.statistics()
        listener = subprocess.Popen(
            [*lab.command("c"), sys.executable, "-c", _DRAIN, lab.addresses["c"]], stdout=subprocess.PIPE, text=True
        )
        assert listener.stdout is not None
        port = listener.stdout.readline().strip()
        assert run(lab, "a", sys.executable, "-c", _SEND, lab.addresses["c"], port).returncode == 0
        assert listener.communicate(timeout=30)[0].strip() == "1448000"
        after = lab.statistics()
    assert all(pair.packets == 0 for pair in before.pairs.values())
    assert 1000 <= after.pairs["a", "c"].packets <= 1100
    assert 1_514_000 <= after.pairs["a", "c"].wire_bytes <= 1_530_000
    assert after.pairs["c", "a"].packets > 0
    used = {pair for pair, count in after.pairs.items() if count.packets}
    assert used == {("a", "c"), ("c", "a")}  # neither ARP nor router discovery
    assert after.worst_lateness_s >= after.mean_lateness_s > 0


_DRAIN = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, size = server.accept()[0], 0
    while data := connection.recv(65536):
        size += len(data)
    print(size)
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    connection.sendall(bytes(1448 * 1000))
"""


# Isolation and clean-up


def test_nothing_outside_can_be_reached(lab: Lab) -> None:
    attempt = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
    done = run(lab, "a", sys.executable, "-c", attempt)
    assert "Network is unreachable" in done.stderr
    assert run(lab, "a", "cat", "/proc/net/route").stdout.count("\n") == 2  # the heading and the lab's own network


def test_an_unknown_place_is_named(lab: Lab) -> None:
    with pytest.raises(UserError, match="unknown place 'coordinater': did you mean 'coordinator'"):
        lab.command("coordinater")


def test_a_measurement_too_short_to_settle_is_refused(lab: Lab) -> None:
    with pytest.raises(UserError, match="at least 1 s"):
        measure(lab, "a", "b", 0.5)


def test_nothing_is_left_behind(host: None) -> None:
    interfaces = socket.if_nameindex()
    with Lab(fleet("a", "b")) as lab:
        namespace = run(lab, "a", "readlink", "/proc/self/ns/net").stdout.strip()
        assert namespace.startswith("net:")
        assert namespace != os.readlink("/proc/self/ns/net")
        hub = hub_pid(lab)
        assert socket.if_nameindex() == interfaces
    assert socket.if_nameindex() == interfaces
    assert has_ended(hub)
    assert processes_in(namespace) == []


def test_a_killed_parent_takes_its_lab_along(host: None) -> None:
    callbacks = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.runtime.test_lab import Lab, fleet, hub_pid
with Lab(fleet("a", "b")) as lab:
    print(hub_pid(lab), flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", callbacks], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        hub = int(parent.stdout.readline())
        assert Path(f"/proc/{hub}").exists()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert has_ended(hub)


def test_a_fork_that_keeps_the_pipes_open_does_not_keep_the_lab_alive(host: None) -> None:
    callbacks = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.runtime.test_lab import Lab, fleet, hub_pid
with Lab(fleet("a", "b")) as lab:
    child = os.fork()
    if child == 0:
        time.sleep(60)
    print(hub_pid(lab), child, flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", callbacks], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    hub, child = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    try:
        assert has_ended(hub)
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_labs_do_not_see_each_other(lab: Lab, host: None) -> None:
    with Lab(fleet("a", "b")) as other:
        names = [run(each, "a", "readlink", "/proc/self/ns/net").stdout for each in (lab, other)]
        assert names[0] != names[1]
        assert all(run(each, "b", "cat", "/proc/net/dev").stdout.count("eth0") == 1 for each in (lab, other))
    assert lab.statistics().overflows == 0


def test_a_dead_hub_is_reported(host: None) -> None:
    with Lab(fleet("a", "b")) as lab:
        os.kill(hub_pid(lab), signal.SIGKILL)
        time.sleep(0.1)
        for _ in range(2):
            with pytest.raises(InternalError, match="has died"):
                lab.statistics()


@pytest.mark.long
def test_the_demonstration_prints_json(
    host: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lab", "--devices", "2", "--seconds", "1", "--json"])
    assert main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["source"], row["target"]) for row in rows] == [("oslo", "tokyo"), ("tokyo", "oslo")]
    assert rows[0]["nominal_delay_s"] == 0.1
    assert 0.097 <= rows[0]["delay_s"] < 1.0  # how exact it is, is tested above


def test_the_demonstration_names_a_wrong_fleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lab", "no-such-fleet"])
    assert main() == 2
    assert "no-such-fleet" in capsys.readouterr().err
