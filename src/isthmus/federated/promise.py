"""The promise of a private job to its clients, before anything runs."""

from __future__ import annotations

from isthmus.federated.admission import Guarantee
from isthmus.federated.job import FederatedJob, build
from isthmus.federated.resident import Resident
from isthmus.federated.server import Server


def promised(job: FederatedJob, population: int) -> Guarantee | None:
    """Return the guarantee of all rounds; None without privacy. UserError where epsilon cannot be computed."""
    if (accounting := job.accounting(population)) is None:
        return None
    resident = Resident(build(job))
    server = Server(job.algorithm(population), resident.vector(), resident.buffers(), population)
    return accounting.guarantee(job.federated.rounds, server.numbers)
