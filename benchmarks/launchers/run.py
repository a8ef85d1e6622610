"""How long many agents of this machine take to join one coordinator, and what memory they take.

python benchmarks/launchers/run.py [--agents 100] [--json PATH]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from isthmus.runtime.launchers.launcher import AgentSpec, open_launcher
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator
from isthmus.runtime.service.fleet_state import FleetState

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

FIGURES = Path(__file__).parent / "results" / "join.json"
LIMIT_S = 600.0
TITLES = (b"isthmus join --name node-", b"isthmus agents")


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    machine: str
    agents: int
    joined_s: float
    """From the launcher's start until all are connected."""
    coordinator_cpu_s: float
    agents_cpu_s: float
    """Of all of them, with the process that they are forked from."""
    own_mib: float
    """Memory that is of no other process, of all agents together."""
    shared_mib: float
    """Their proportional share of pages that several processes have, with the process that they are forked from."""
    load: float
    """Of the machine before, over a minute: what else ran."""
    stopped_s: float


def main() -> None:
    parser = options_of(__doc__, FIGURES)
    parser.add_argument("--agents", type=int, default=100)
    options = parser.parse_args()
    found = joined(options.agents)
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    write_figures(options.json, found)


def joined(count: int) -> Joined:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        private = Path(folder) / "agents"
        private.mkdir(mode=0o700)
        state = FleetState(Path(folder) / "fleet")
        with FleetCoordinator(state, "127.0.0.1", 0, timeout_s=120.0, log=lambda line: None) as service:
            state.listens_at((("127.0.0.1", service.port),))
            service.start()
            names = [f"node-{number}" for number in range(count)]
            arguments = ("--device", "cpu", "--timeout", "120 s")
            launcher = open_launcher("local", {})
            specs = [AgentSpec(name=n, arguments=arguments, ticket=state.ticket()) for n in names]
            cpu_s, began_s = time.process_time(), time.monotonic()
            launcher.start(specs, private, _log)
            while len(service.present) < count and time.monotonic() - began_s < LIMIT_S:
                time.sleep(0.05)
            joined_s, coordinator_s = time.monotonic() - began_s, time.process_time() - cpu_s
            agents_s = _cpu_s()
            assert len(service.present) == count, f"{len(service.present)} of {count} joined"
            own_mib, shared_mib = _memory_mib()
            began_s = time.monotonic()
            launcher.stop()
            stopped_s = time.monotonic() - began_s
    return Joined(
        machine=machine(),
        agents=count,
        joined_s=round(joined_s, 2),
        coordinator_cpu_s=round(coordinator_s, 2),
        agents_cpu_s=round(agents_s, 2),
        own_mib=round(own_mib),
        shared_mib=round(shared_mib),
        load=round(load, 1),
        stopped_s=round(stopped_s, 2),
    )


def _log(name: str, line: str) -> None:
    if "in the fleet" not in line and "computes on" not in line:
        print(f"{name}: {line}")


def _cpu_s() -> float:
    """Of the agents until now, and of the process that they are forked from."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes().startswith(TITLES):
                ticks += sum(map(int, (path / "stat").read_text().rpartition(")")[2].split()[11:13]))
        except OSError:  # it has ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory_mib() -> tuple[float, float]:
    """Of this process's children and theirs: memory of their own, and proportional shares of the rest."""
    own_kib = all_kib = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if not (path / "cmdline").read_bytes().startswith(TITLES):
                continue
            rows = dict(line.split(":") for line in (path / "smaps_rollup").read_text().splitlines()[1:])
        except OSError:
            continue
        kib = {name: int(value.split()[0]) for name, value in rows.items()}
        own_kib += kib["Private_Clean"] + kib["Private_Dirty"]
        all_kib += kib["Pss"]
    return own_kib / 1024, (all_kib - own_kib) / 1024


if __name__ == "__main__":
    main()
