"""Whether an algorithm's updates go together with how the job combines them: known once the server has its values."""

from __future__ import annotations

import math

from isthmus.combinations import refused
from isthmus.federated.algorithms import AlgorithmSpec, load_algorithm
from isthmus.federated.buffers import is_buffer
from isthmus.federated.job import FederatedJob
from isthmus.federated.server import Server


def check_updates(job: FederatedJob, server: Server) -> None:
    """UserError for an algorithm whose updates cannot be late, clipped as one, or combined by the job's rule."""
    name = job.federated.algorithm
    if job.federated.participation.staleness and (server.keeps or server.passes > 1):
        raise refused("late updates", "states or passes", job.federated.participation.staleness)
    if job.privacy is not None and (single := _single_number(server)):
        raise refused("a single number", "client privacy", f"{name}, which returns {single!r},")
    if job.federated.aggregation.rule != "declared" and server.keeps and not _is_free(job):
        raise refused("robust aggregation", "summed states", repr(job.federated.aggregation.rule))


def _is_free(job: FederatedJob) -> bool:
    """Return whether the server's values do not depend on what clients keep."""
    spec = AlgorithmSpec(name=job.federated.algorithm, options=job.federated.options)
    return load_algorithm(spec).state_can_be_lost


def _single_number(server: Server) -> str:
    """The name of one beside a larger value; empty for none."""
    for forms in server.forms:
        sizes = {name: math.prod(form.shape) for name, form in forms.items() if not is_buffer(name)}
        for name, size in sizes.items():
            if size == 1 < max(sizes.values()):
                return name
    return ""
