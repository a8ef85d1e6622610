"""`isthmus simulate` for a federated job: the coordinator and executors of a run on a virtual clock.

What a client takes is measured on this machine, with the job's model and data; how executors differ is the job's
emulation. So no round is trained, and a population of a million is a matter of seconds.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import typer
from rich.console import Console

from isthmus.data.clients import ClientData
from isthmus.errors import UserError
from isthmus.federated.admission import first_state
from isthmus.federated.cohorts import Cohorts
from isthmus.federated.job import (
    FederatedJob,
    build,
    check_simulation,
    client_data,
    emulation,
)
from isthmus.federated.resident import Resident
from isthmus.federated.server import Server
from isthmus.federated.state_form import StateForm
from isthmus.federated.states import StateStore
from isthmus.federated.worksite import Work, Worksite
from isthmus.protocol.federated_events import Line, Opening, Task, Turn
from isthmus.report.federated_progress import simulated_table
from isthmus.runtime.federated.run import coordinator_of
from isthmus.simulator.federated import FederatedCosts, simulate_federated

REPEATS = 3


def simulate(job: FederatedJob, out: Console, *, json: bool) -> int:
    """The whole command; returns the exit code."""
    if job.scheme.per == "population":
        raise UserError(f"execution.scheme: got {job.execution.scheme!r}, expected one with executors for many clients")
    check_simulation(job)
    data = client_data(job)
    line = measured_line(job, data)
    machine = coordinator_of(job, data.sizes, Cohorts(job, data.sizes), 0, None)
    count = len(machine.executors)
    emulated = [emulation(job, k) for k in range(count)]
    costs = FederatedCosts(
        lines=(line,) * count, noise=job.execution.noise, factor=lambda k, round_: emulated[k].factor(round_)
    )  # fmt: skip
    rounds = simulate_federated(machine, costs, job.federated.seed)
    if json:
        told = {
            "rounds": len(rounds), "executors": count, "seconds_per_sample": line.seconds_per_sample,
            "fixed_s": line.fixed_s, "round_s": statistics.median(r.seconds for r in rounds),
            "total_s": sum(r.seconds for r in rounds),
        }  # fmt: skip
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
    else:
        out.print(simulated_table(rounds, line))
    return 0


def measured_line(job: FederatedJob, data: ClientData) -> Line:
    """Seconds for a client on this machine: the quickest of a few, for a small one and a large one, and between them
    a line."""
    algorithm = job.algorithm(len(data.sizes))
    work = Work(algorithm=algorithm, local=job.local, seed=job.federated.seed)
    with tempfile.TemporaryDirectory() as folder:
        module = build(job)
        first = first_state(algorithm, Resident(module).vector())
        states = None if first is None else StateStore(Path(folder), StateForm(first))
        return _line(Worksite(work, module, data, states), job, data)


def _line(site: Worksite, job: FederatedJob, data: ClientData) -> Line:
    algorithm = job.algorithm(len(data.sizes))
    order = np.argsort(data.sizes, kind="stable")
    chosen = [int(order[len(order) // 10]), int(order[-1 - len(order) // 10])]
    site.warm_up(chosen[0])
    told = Server(algorithm, site.resident.vector(), site.resident.buffers(), len(data.sizes)).broadcast()
    found: list[tuple[int, float]] = []
    for client in chosen:
        samples = int(data.sizes[client])
        seconds: list[float] = []
        for _ in range(REPEATS):
            site.open(Opening(turn=Turn(0), clients=1, samples=samples), told)
            timed, refused = site.train([Task(client, samples)])
            if refused:
                raise UserError(f"a client cannot be measured: {refused[0].reason}")
            seconds.append(timed[0].seconds)
        found.append((samples, min(seconds)))
    (few, few_s), (many, many_s) = found
    per_sample = max(0.0, (many_s - few_s) / (many - few)) if many > few else many_s / many
    return Line(per_sample, max(0.0, few_s - few * per_sample))
