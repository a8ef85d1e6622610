"""Sites with networks of their own, over real TCP: one pair cannot reach each other."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from isthmus.api.folder import RunFolder
from isthmus.fleet import Device, Fleet, Link, Links, load_fleet
from isthmus.job import load_job, prepare
from isthmus_testing.lab import COORDINATOR, Lab, lab_unavailable
from tests.runtime.commands import edited, write_job
from tests.runtime.jobs import plain_run

from .test_two_machines import Machines, Place

SITES = ("oslo", "porto", "lima")
LINK = Link(0.01, 2.5e6)
LIMIT_S = 400.0
MOST_LATE_S = 5e-4
"""Of the lab's packets in the mean; with more, what is shaped is not what was asked for."""
STEPS = 4


@pytest.fixture
def lab() -> Iterator[Lab]:
    if reason := lab_unavailable():
        pytest.skip(reason)
    devices = tuple(Device(name=n, region=f"at-{n}", flops_per_s=1e9, memory_bytes=1 << 30) for n in SITES)
    fleet = Fleet(name="far", devices=devices, links=Links(default=LINK))
    with Lab(fleet, coordinator_link=LINK, apart=[("oslo", "porto")]) as lab:
        yield lab


def _awaited(process: subprocess.Popen[str], machines: Machines) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert process.returncode == 0, machines.description()


@pytest.mark.long
def test_sites_that_cannot_reach_each_other_train_as_the_plain_loop_does(lab: Lab, tmp_path: Path) -> None:
    machines = Machines(Place(lab.command, str), tmp_path)
    serve = f"--host {lab.addresses[COORDINATOR]} --port 7433 --state {tmp_path}/fleet"
    names = " ".join(SITES)
    try:
        probe = machines.start(COORDINATOR, f"isthmus probe {names} {serve} --tickets 3 --out {tmp_path}/found.toml")
        for site in SITES:
            assert probe.stdout is not None
            machines.start(site, f"isthmus join --name {site}", probe.stdout.readline())
        _awaited(probe, machines)
        assert machines.description().count("they cannot reach each other, the coordinator relays") == 2  # one each way
        found = load_fleet(tmp_path / "found.toml")
        _no_better_than_the_link(found.link("oslo", "lima"), 1)
        _no_better_than_the_link(found.link("oslo", "porto"), 2)
        job = edited(
            write_job(tmp_path, steps=STEPS, fleet=str(tmp_path / "found.toml")),
            ("layers = 2", "layers = 4"),
            ("eval_every = 5\n", ""),
            ("save_every = 3\n", ""),
        )
        _awaited(machines.start(COORDINATOR, f"isthmus serve {job} {serve} --tickets 0"), machines)
        folder = RunFolder(tmp_path / "runs" / "small")
        assert sorted(folder.plan().devices) == sorted(SITES)
        measured = folder.measured()
        assert {"oslo", "porto"} in [{span.device, span.other} for span in measured.spans if span.track == "send"]
    finally:
        machines.end()
    _, expected = plain_run(load_job(job), prepare(load_job(job)))
    assert [point.loss for point in folder.losses()] == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_a_probe_measures_what_was_shaped(lab: Lab, tmp_path: Path) -> None:
    """Latency and bandwidth of all six links, two of them relayed, within a tenth. What else a machine does makes a
    probe worse, never better: one of three probes has to be right."""
    machines = Machines(Place(lab.command, str), tmp_path)
    serve = f"--host {lab.addresses[COORDINATOR]} --port 7433 --state {tmp_path}/fleet"
    wrong: list[str] = []
    try:
        for attempt in range(3):
            out = tmp_path / f"found-{attempt}.toml"
            tickets = 0 if attempt else 3
            probe = machines.start(
                COORDINATOR, f"isthmus probe {' '.join(SITES)} {serve} --tickets {tickets} --out {out}"
            )
            for site in () if attempt else SITES:
                assert probe.stdout is not None
                machines.start(site, f"isthmus join --name {site}", probe.stdout.readline())
            _awaited(probe, machines)
            found = load_fleet(out)
            wrong = [
                told
                for a, b in permutations(SITES, 2)
                if (told := _unlike_the_link(found.link(a, b), 2 if {a, b} == {"oslo", "porto"} else 1))
            ]
            if not wrong:
                return
    finally:
        machines.end()
    late_s = lab.statistics().mean_lateness_s
    if late_s > MOST_LATE_S:
        pytest.skip(f"this machine is too busy to shape links: packets were {late_s * 1e3:.1f} ms late in the mean")
    raise AssertionError("; ".join(wrong))


def _unlike_the_link(link: Link, hops: int) -> str:
    """What is further than a tenth, or a millisecond, from what was shaped. The wire carries headers too, which a
    message does not count: 1448 of 1514 bytes are TCP's payload."""
    latency_s = hops * LINK.latency_s
    told = f"{hops} hops: {link.latency_s * 1e3:.2f} ms, {link.bandwidth_bytes_per_s / 1e6:.3f} MB/s"
    print(told, file=sys.stderr)
    near = abs(link.latency_s - latency_s) <= max(0.1 * latency_s, 1e-3)
    return "" if near and abs(link.bandwidth_bytes_per_s / LINK.bandwidth_bytes_per_s - 1) <= 0.1 else told


def _no_better_than_the_link(link: Link, hops: int) -> None:
    """How much worse a busy machine may measure it says little."""
    assert 0.9 * hops * LINK.latency_s < link.latency_s < 5 * hops * LINK.latency_s
    assert LINK.bandwidth_bytes_per_s / 5 < link.bandwidth_bytes_per_s < 1.1 * LINK.bandwidth_bytes_per_s
