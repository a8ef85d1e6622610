"""One coordinator and a thousand devices: to join, to stay, to work for a job and a federated round, to be lost.

python benchmarks/thousand/run.py [--quick] [--devices N ...] [--json PATH]

The coordinator is this process; for several numbers of devices, a process for each. The devices are light ones, in a
few processes: they speak the protocol over TLS, each with a key and connections of its own, and threads of their
process do what others start a process for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from isthmus.cost import PlanLayout, build_replicas
from isthmus.experiments import RunOptions, Watcher, check_outcome, run_plan
from isthmus.federated.job import load_federated_job
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import Flow, cuts
from isthmus.job import load_job, prepare
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.fleet_state import FleetState

sys.path.insert(0, str(Path(__file__).parents[1]))
from light_devices import SITE, TIMEOUT_S, forked

from harness import machine, options_of, own_status, write_figures
from sites import write_job, write_site

FIGURES = Path(__file__).parent / "results" / "latest.json"
COUNTS, QUICK = (125, 250, 500, 1000), (100,)
IDLE_S = 10.0
LOST = 100
"""Devices that are lost at one moment; a tenth of fewer than a thousand."""
STAGES, REPLICAS = 8, 8
ROUNDS = 3
MIB = 1 << 20
LIMIT_S = 900.0

JOB = """
name = "stages"
run_dir = "{folder}"

[model]
name = "gpt"
options = {{ vocab_size = 256, sequence_length = 16, width = 16, layers = 8, heads = 2 }}

[data]
kind = "text"
options = {{ files = "stdlib", sequence_length = 16, max_bytes = 40000 }}

[training]
steps = 5
batch_size = 16
micro_batches = 16

[runtime]
emulate = false
timeout = "60 s"
"""


class Thousand(msgspec.Struct, frozen=True, kw_only=True):
    """With so many devices. CPU is the coordinator's."""

    devices: int
    load: float
    """Of the machine before, over a minute: what else ran."""
    join_s: float
    join_cpu_s: float
    idle_cpu_share: float
    """Of a core, while nothing happens but heartbeats."""
    memory_mib: float
    """Resident, of the coordinator with all devices idle; `without_mib` with none."""
    without_mib: float
    threads: int
    job_devices: int
    job_start_s: float
    """Of a job over them: until its first step is done."""
    job_step_s: float
    sites_start_s: float
    """Of a federated run over all devices: until its first round is over."""
    sites_start_cpu_s: float
    round_s: float
    """Of a later round."""
    round_cpu_s: float
    ended_noticed_s: float
    """Until all of a tenth of the devices are known to be lost, whose process was killed."""
    silent_noticed_s: float
    """The same for devices that say nothing any more; the timeout is 60 s."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    fleets: tuple[Thousand, ...]


def main() -> None:
    parser = options_of(__doc__, FIGURES, f"{QUICK[0]} devices")
    parser.add_argument("--devices", type=int, nargs="+", default=COUNTS)
    options = parser.parse_args()
    counts: Sequence[int] = QUICK if options.quick else options.devices
    fleets: tuple[Thousand, ...] = ()
    for count in counts:
        fleets += (measured(count),) if len(counts) == 1 else apart(count)
        write_figures(options.json, Figures(machine=machine(), fleets=fleets))
    Console(width=120).print(table(fleets))


def apart(count: int) -> tuple[Thousand, ...]:
    """In a process of its own: memory and threads of a smaller fleet are gone."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "figures.json"
        command = [sys.executable, __file__, "--devices", str(count), "--json", str(part)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return msgspec.json.decode(part.read_bytes(), type=Figures).fleets


def table(fleets: tuple[Thousand, ...]) -> Table:
    """A column for each."""
    shown = Table("devices", *(str(fleet.devices) for fleet in fleets))
    for name in Thousand.__struct_fields__[1:]:
        shown.add_row(name, *(str(getattr(fleet, name)) for fleet in fleets))
    for name, seconds in (("join", "join_cpu_s"), ("sites' start", "sites_start_cpu_s"), ("round", "round_cpu_s")):
        cells = (f"{1e3 * getattr(fleet, seconds) / fleet.devices:.1f}" for fleet in fleets)
        shown.add_row(f"{name}: ms CPU a device", *cells)
    return shown


def measured(count: int) -> Thousand:
    lost = min(LOST, count // 10)
    load, without = os.getloadavg()[0], own_status("VmRSS")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = FleetState(folder / "fleet")
        names = [f"d{number}" for number in range(count)]
        service = FleetCoordinator(state, "127.0.0.1", 0, timeout_s=TIMEOUT_S, log=lambda _: None)
        state.listens_at((("127.0.0.1", service.port),))
        with devices_in(folder, state, split(names, lost)) as processes, service:
            began_s, cpu_s = time.monotonic(), time.process_time()
            service.start()
            reached(lambda: len(service.present) == count)
            join_s, join_cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
            say(f"{count} joined after {join_s:.1f} s, {join_cpu_s:.1f} s CPU")
            time.sleep(5.0)  # what joining has begun ends
            cpu_s = time.process_time()
            time.sleep(IDLE_S)
            idle = (time.process_time() - cpu_s) / IDLE_S
            memory, threads = own_status("VmRSS"), own_status("Threads")
            say(f"idle: {idle:.3f} cores, {memory / MIB:.0f} MiB")
            wanted = min(STAGES * REPLICAS, count // STAGES * STAGES)
            at_work = names[:: count // wanted][:wanted]  # of all processes: those of one share an interpreter
            job_start_s, job_step_s = pipeline(service, folder, at_work)
            say(f"job over {len(at_work)}: {job_start_s:.1f} s, {job_step_s:.2f} s a step")
            rounds = federated(service, folder, names)
            say(", ".join(f"{name}: {seconds:.2f}" for name, seconds in rounds.items()))
            ended_s = losing(service, processes[-1], signal.SIGKILL, count - lost)
            silent_s = losing(service, processes[-2], signal.SIGSTOP, count - 2 * lost)
            say(f"lost: {ended_s:.2f} s, {silent_s:.2f} s")
    return Thousand(
        devices=count,
        load=round(load, 1),
        join_s=round(join_s, 1),
        join_cpu_s=round(join_cpu_s, 2),
        idle_cpu_share=round(idle, 3),
        memory_mib=round(memory / MIB),
        without_mib=round(without / MIB),
        threads=threads,
        job_devices=len(at_work),
        job_start_s=round(job_start_s, 1),
        job_step_s=round(job_step_s, 2),
        ended_noticed_s=round(ended_s, 2),
        silent_noticed_s=round(silent_s, 2),
        **rounds,
    )


def split(names: list[str], lost: int) -> list[list[str]]:
    """By process: four, and two whose devices will be lost."""
    stay = names[: len(names) - 2 * lost]
    quarter = -(-len(stay) // 4)
    return [stay[at : at + quarter] for at in range(0, len(stay), quarter)] + [
        names[-2 * lost : -lost],
        names[-lost:],
    ]


@contextlib.contextmanager
def devices_in(folder: Path, state: FleetState, groups: list[list[str]]) -> Generator[list[int]]:
    """Processes with these devices, which begin to join."""
    private = folder / "devices"
    private.mkdir(mode=0o700)
    processes: list[int] = []
    try:
        for names in groups:
            processes.append(forked(private, names, [state.ticket() for _ in names]))
        yield processes
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def pipeline(service: FleetCoordinator, folder: Path, names: list[str]) -> tuple[float, float]:
    """Seconds to the first step of a job over these devices, and of a later step."""
    path = folder / "job.toml"
    path.write_text(JOB.format(folder=folder / "runs"))
    prepared = prepare(load_job(path))
    members = tuple(Device(name=n, region="here", flops_per_s=1e12, memory_bytes=1 << 34) for n in names)
    fleet = Fleet(name="light", devices=members, links=Links(default=Link(1e-4, 1e9)))
    legal = [cut.position for cut in cuts(Flow(prepared.captured.train))]
    ends = tuple(legal[len(legal) * number // STAGES] for number in range(1, STAGES))
    count = len(names) // STAGES
    orders = [tuple(names[STAGES * number : STAGES * (number + 1)]) for number in range(count)]
    share = prepared.job.micro_batches // count
    plan = build_replicas(
        prepared.problem(fleet), [PlanLayout(order, ends, share) for order in orders], planner="given"
    )
    done: list[float] = []

    def advanced(item: object, loss: float | None, spans: object) -> None:
        done.append(time.monotonic())

    began_s = time.monotonic()
    options = RunOptions(emulate=False, backend=service)
    check_outcome(run_plan(prepared, plan, fleet, folder / "run", options, Watcher(advanced=advanced)))
    return done[0] - began_s, (done[-1] - done[0]) / (len(done) - 1)


def federated(service: FleetCoordinator, folder: Path, names: list[str]) -> dict[str, float]:
    """By the field's name, what `Thousand` has of a federated run over these devices."""
    write_site(folder / "devices" / SITE, "fedavg")
    write_job(folder / "sites.toml", names, "fedavg", ROUNDS)
    job = load_federated_job(folder / "sites.toml")
    passed: list[tuple[float, float]] = [(time.monotonic(), time.process_time())]

    def watch(line: object) -> None:
        passed.append((time.monotonic(), time.process_time()))

    (folder / "rounds").mkdir()
    SiteRun(job, folder / "rounds", resume=False, watch=watch).run(service)
    (begun_s, begun_cpu_s), (first_s, first_cpu_s), (last_s, last_cpu_s) = passed[0], passed[1], passed[-1]
    later = len(passed) - 2
    return {
        "sites_start_s": round(first_s - begun_s, 1),
        "sites_start_cpu_s": round(first_cpu_s - begun_cpu_s, 2),
        "round_s": round((last_s - first_s) / later, 2),
        "round_cpu_s": round((last_cpu_s - first_cpu_s) / later, 2),
    }


def losing(service: FleetCoordinator, process: int, how: signal.Signals, left: int) -> float:
    began_s = time.monotonic()
    os.kill(process, how)
    reached(lambda: len(service.present) == left)
    return time.monotonic() - began_s


def reached(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            sys.exit("it did not come to it")
        time.sleep(0.02)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
