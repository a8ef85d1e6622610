"""A federated job on the devices of a fleet: simulated, and emulated by processes of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from isthmus.api.rounds import simulate_rounds
from isthmus.errors import UserError
from isthmus.federated.client_costs import client_costs
from isthmus.federated.emulated_speed import DevicePacer, SpeedEmulation, executor_fleet
from isthmus.federated.evaluation import RoundLine
from isthmus.federated.job import FederatedJob, client_data, load_federated_job
from isthmus.programs.open_phase import RoundRecord
from isthmus.runtime.federated.run import FederatedRun
from tests.federated.test_pacing import Host
from tests.federated.test_run_folders import JOB
from tests.runtime.commands import isthmus, refused
from tests.tiers import represented_by

FLEET = """
name = "three"

[[device]]
name = "slow"
region = "a"
compute = "5 MFLOPS"
memory = "1 GB"

[[device]]
name = "middle"
region = "b"
compute = "10 MFLOPS"
memory = "1 GB"

[[device]]
name = "fast"
region = "c"
compute = "20 MFLOPS"
memory = "1 GB"

[links]
default = { latency = "1 ms", bandwidth = "100 MB/s" }
"""
FLOPS_PER_SAMPLE = (2 * 64 * 64 + 3 * 64 * 10) * 2
"""Of a perceptron 64-64-10: two products of the first layer, whose input needs no gradient, three of the second."""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """Twenty clients of unequal sizes, eight a round, on three devices."""
    (tmp_path / "fleet.toml").write_text(FLEET)
    text = JOB.format(folder=tmp_path).replace("width = 4", "width = 64").replace("rounds = 3", "rounds = 4")
    text = text.replace('scheme = "iid"\nclients = 5', 'scheme = "dirichlet"\nclients = 20\nalpha = 1.0')
    text = text.replace("clients = 3\n", "clients = 8\n").replace('"sp"', '"parrot"\nexecutors = 3')
    path = tmp_path / "job.toml"
    path.write_text(f'fleet = "{tmp_path}/fleet.toml"\n{text}')
    return path


def read(path: Path, overrides: Mapping[str, object] = {}) -> FederatedJob:
    return load_federated_job(path, overrides)


def samples_of(record: RoundRecord) -> dict[str, int]:
    return {name: sum(t.samples for t in timed) for name, timed in record.trained.items()}


def who(record: RoundRecord) -> dict[str, list[int]]:
    """The clients of each executor, in the order in which they were trained."""
    return {name: [t.client for t in timed] for name, timed in sorted(record.trained.items())}


def test_a_faster_device_trains_more_and_the_round_ends_sooner(job_file: Path) -> None:
    found = simulate_rounds(read(job_file))
    uniform = simulate_rounds(read(job_file, {"runtime.planner": "uniform"}))
    last, equal = found.rounds[-1], uniform.rounds[-1]
    samples = samples_of(last.record)
    assert samples["fast"] > samples["middle"] > samples["slow"]
    assert last.seconds < 0.75 * equal.seconds
    assert {t.client for each in last.record.trained.values() for t in each} == {
        t.client for each in equal.record.trained.values() for t in each
    }


def test_a_client_lasts_as_long_as_its_flops_on_its_device(job_file: Path) -> None:
    found = simulate_rounds(read(job_file, {"training.epochs": 3}))
    for record in (round_.record for round_ in found.rounds):
        for name, flops_per_s in (("slow", 5e6), ("middle", 10e6), ("fast", 20e6)):
            for timed in record.trained[name]:
                assert timed.seconds == pytest.approx(3 * timed.samples * FLOPS_PER_SAMPLE / flops_per_s)
    assert [device.device for device in found.devices] == ["slow", "middle", "fast"]


def test_messages_take_the_links_of_the_coordinators_place(job_file: Path) -> None:
    numbers = 64 * 64 + 64 + 64 * 10 + 10
    slow, middle, _ = simulate_rounds(read(job_file)).devices
    assert (slow.broadcast_s, slow.sums_s) == (0.0, 0.0), "it shares the coordinator's machine"
    assert middle.broadcast_s == pytest.approx(1e-3 + 4 * numbers / 100e6)
    assert middle.sums_s == pytest.approx(1e-3 + 8 * numbers / 100e6)
    moved = simulate_rounds(read(job_file, {"coordinator": "fast"})).devices
    assert [device.sums_s for device in moved] == [middle.sums_s, middle.sums_s, 0.0]


def test_without_a_number_of_executors_there_is_one_on_each_device(job_file: Path) -> None:
    assert simulate_rounds(read(job_file, {"runtime.executors": 0})).executors == 3


def test_executors_are_taken_from_the_regions_in_turn() -> None:
    four = executor_fleet("parrot-a", "", 4)
    assert [device.region for device in four.devices] == ["node-0", "node-1", "node-2", "node-3"]
    assert four.incoming(0) is None
    incoming = four.incoming(1)
    assert incoming is not None and incoming.bandwidth_bytes_per_s == pytest.approx(1.25e9)
    assert len(executor_fleet("parrot-c", "", 0).devices) == 8


def test_the_same_job_is_simulated_the_same_again(job_file: Path) -> None:
    overrides = {"runtime.scheme": "ours", "runtime.noise": 0.3, "federated.algorithm": "scaffold"}
    first, second = (simulate_rounds(read(job_file, overrides)) for _ in range(2))
    assert [r.seconds for r in first.rounds] == [r.seconds for r in second.rounds]
    assert [msgspec.to_builtins(r.record) for r in first.rounds] == [
        msgspec.to_builtins(r.record) for r in second.rounds
    ]


@pytest.mark.parametrize(
    "overrides",
    represented_by([{}, {"runtime.unstable": True}, {"federated.algorithm": "mime", "coordinator": "middle"}], {}),
    ids=["fedavg", "unstable", "two passes"],
)
def test_a_run_of_emulated_devices_decides_as_it_is_simulated(
    overrides: dict[str, object], job_file: Path, tmp_path: Path
) -> None:
    job = read(job_file, overrides)
    lines: list[RoundLine] = []
    run = FederatedRun(job, tmp_path / "run", resume=False, watch=lines.append)
    assert run.run().outcome == "done"
    simulated = simulate_rounds(job).rounds
    assert [who(line.record) for line in lines] == [who(round_.record) for round_ in simulated]
    assert simulated[-1].record.predicted_s is not None, "the last round was planned by fitted times"


@pytest.mark.parametrize(
    ("algorithm", "flops", "broadcast", "sums", "keeps"),
    [
        ("fedavg", (1,), (4,), (8,), False),
        ("scaffold", (1,), (8,), (16,), True),
        ("mime", (1, 4), (12, 12), (8, 8), False),
    ],
)
def test_costs_are_counted_by_pass(
    algorithm: str,
    flops: tuple[int, ...],
    broadcast: tuple[int, ...],
    sums: tuple[int, ...],
    keeps: bool,
    job_file: Path,
) -> None:
    """Mime evaluates every batch twice in its second pass, in each of two epochs."""
    job = read(job_file, {"federated.algorithm": algorithm, "training.epochs": 2 if algorithm == "mime" else 1})
    costs = client_costs(job, client_data(job))
    numbers = costs.model_bytes // 4
    assert tuple(one.flops / FLOPS_PER_SAMPLE for one in costs.passes) == flops
    assert tuple(one.broadcast_bytes / numbers for one in costs.passes) == broadcast
    assert tuple(one.sums_bytes / numbers for one in costs.passes) == sums
    assert (costs.state_bytes > 4 * numbers) == keeps


def test_what_is_collected_counts_for_every_client(job_file: Path) -> None:
    job = read(job_file, {"federated.aggregation.rule": "median"})
    (costs,) = client_costs(job, client_data(job)).passes
    assert (costs.sums_bytes, costs.collected_bytes) == (0, costs.broadcast_bytes)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"runtime.executors": 4}, ["has 3 devices, expected at least 4, one for each executor"]),
        ({"runtime.slow_down": [1.0, 2.0, 3.0]}, ["runtime.slow_down: got 3 numbers beside fleet"]),
        ({"fleet": "parrot-d"}, ["unknown fleet 'parrot-d': did you mean 'parrot-"]),
        ({"fleet": "nowhere.toml"}, ["nowhere.toml"]),
        ({"coordinator": "fasd"}, ["coordinator: unknown device 'fasd'", "fast"]),
        ({"fleet": "", "coordinator": "fast"}, ["coordinator: got 'fast' without a fleet, expected none"]),
    ],
)
def test_fleets_that_cannot_be(overrides: dict[str, object], words: list[str], job_file: Path) -> None:
    options = [f"--set={name}={msgspec.json.encode(value).decode()}" for name, value in overrides.items()]
    refused(isthmus("simulate", job_file, *options), 2, *words)


def test_one_process_for_each_client_needs_as_many_devices(job_file: Path) -> None:
    with pytest.raises(UserError, match="has 3 devices, expected at least 8, one for each executor"):
        simulate_rounds(read(job_file, {"runtime.scheme": "sd"}))


def test_a_device_that_is_too_small_is_named(job_file: Path) -> None:
    fleet = job_file.parent / "fleet.toml"
    fleet.write_text(FLEET.replace('"10 MFLOPS"\nmemory = "1 GB"', '"10 MFLOPS"\nmemory = "50 kB"'))
    with pytest.raises(UserError, match=r"fleet: device 'middle' has .* expected at least .* and the sums"):
        simulate_rounds(read(job_file))


class TestDevicePacer:
    """On a machine whose clocks are the test's."""

    def pacer(self, host: Host) -> DevicePacer:
        return DevicePacer(
            lambda samples, number: (1 + number) * samples,
            SpeedEmulation(),
            receive_s=lambda size_bytes: size_bytes / 10,
            send_s=lambda size_bytes: size_bytes / 5,
            clock=lambda: host.clock_s,
            core=lambda: host.core_s,
            sleep=host.sleep,
        )

    def train(self, host: Host, pacer: DevicePacer, samples: int, core_s: float, waited_s: float = 0.0) -> float:
        pacer.begin()
        host.work(core_s, waited_s)
        return pacer.end(samples)

    def test_a_client_lasts_as_on_the_device_whatever_this_machine_takes(self) -> None:
        host = Host(late_s=0.25)
        pacer = self.pacer(host)
        assert [self.train(host, pacer, 2, 0.5, waited_s=w) for w in (0.0, 4.0, 0.0, 0.0)] == [2.0] * 4
        assert host.clock_s == pytest.approx(4 * 2.0 + 0.25), "what was lost is made up for"
        pacer.open(0, 1)
        assert self.train(host, pacer, 2, 0.5) == 4.0, "the second pass computes twice as much"

    def test_this_machine_is_no_faster_than_it_is(self) -> None:
        host = Host()
        assert self.train(host, self.pacer(host), 2, 3.0) == 3.0
        assert not host.slept

    def test_values_take_as_long_as_on_the_link(self) -> None:
        host = Host()
        pacer = self.pacer(host)
        pacer.received(lambda: 20)
        pacer.sends(lambda: 20)
        assert host.slept == [2.0, 4.0]


def test_states_move_only_to_another_executor(job_file: Path) -> None:
    """A round of all clients on two devices: a client costs more only where it comes to the other one."""
    found = simulate_rounds(
        read(
            job_file,
            {"federated.algorithm": "scaffold", "federated.participation.clients": 20, "runtime.executors": 2},
        )
    )
    keeps: dict[int, str] = {}
    moved = 0
    state_s = 1e-3 + client_costs_state_bytes(job_file) / 100e6
    for round_ in found.rounds:
        for name, flops_per_s in (("slow", 5e6), ("middle", 10e6)):
            for timed in round_.record.trained[name]:
                moves = keeps.get(timed.client, name) != name
                computed_s = timed.samples * FLOPS_PER_SAMPLE / flops_per_s
                assert timed.seconds == pytest.approx(computed_s + (state_s if moves else 0.0))
                moved += moves
                keeps[timed.client] = name
    assert moved, "the schedule that follows the first rounds is another one"


def client_costs_state_bytes(job_file: Path) -> int:
    job = read(job_file, {"federated.algorithm": "scaffold"})
    return client_costs(job, client_data(job)).state_bytes


def test_noise_is_of_every_client_by_itself(job_file: Path) -> None:
    found = simulate_rounds(read(job_file, {"runtime.noise": 0.2}))
    timed = [t for r in found.rounds for t in r.record.trained["fast"]]
    assert np.std([t.seconds / t.samples for t in timed]) > 0
