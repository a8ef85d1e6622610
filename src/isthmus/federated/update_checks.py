"""Whether an algorithm's updates go together with how the job combines them: known once the server has its values."""

from __future__ import annotations

import math

from isthmus.errors import UserError
from isthmus.federated.algorithms import AlgorithmSpec, load_algorithm
from isthmus.federated.buffers import is_buffer
from isthmus.federated.job import FederatedJob
from isthmus.federated.server import Server


def check_updates(job: FederatedJob, server: Server) -> None:
    """UserError for an algorithm whose updates cannot be late, clipped as one, or combined by the job's rule."""
    name = job.federated.algorithm
    if job.participation.staleness and (server.keeps or server.passes > 1):
        raise UserError(
            f"participation.staleness: got {job.participation.staleness} with an algorithm whose clients keep "
            "something, or that takes several passes a round: expected 0"
        )
    if job.privacy is not None and (single := _single_number(server)):
        what = f"privacy: {name} returns the single number {single!r} beside the model's change"
        raise UserError(f"{what}, and a clip of both scales it too: expected an algorithm without it, as fedavg")
    if job.aggregation.rule != "declared" and server.keeps and not _is_free(job):
        what = f"aggregation.rule: got {job.aggregation.rule!r} with {name}, whose server adds up what clients keep"
        raise UserError(f"{what}, which is not what the rule takes of them: expected 'declared'")


def _is_free(job: FederatedJob) -> bool:
    """Whether the server's values do not depend on what clients keep."""
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
