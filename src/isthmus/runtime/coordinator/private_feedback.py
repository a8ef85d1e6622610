"""Whether error feedback on a plan's edges can work: samples come again, and there is memory for what they left out."""

from __future__ import annotations

from isthmus.cost.stage_costs import value_spec
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.graph import Affine
from isthmus.job import Prepared, constraints_of
from isthmus.plans import Edge, Plan


def check_feedback(prepared: Prepared, plan: Plan, fleet: Fleet) -> None:
    """UserError where a plan asks for feedback that would do nothing, or that its devices cannot hold."""
    job, samples, constraints = prepared.job, prepared.samples.train, constraints_of(prepared.job, fleet)
    for replica in plan.replicas:
        for stage, place in enumerate(replica.stages):
            edges = [e for e in replica.edges if e.target == stage and _remembers(e)]
            for edge in edges:
                _check_values(prepared, edge)
            used = job.training.steps * job.training.batch_size
            if edges and used <= samples:
                raise UserError(
                    f"compression.feedback: got true, and {job.training.steps} steps of {job.training.batch_size} see "
                    f"none of the {samples} samples twice, expected more than one pass: what is left out of a sample's "
                    "gradients is added when it comes again"
                )
            kept_bytes = samples * sum(e.backward_bytes for e in edges) // job.micro_batch_size
            needed_bytes = place.memory.total + kept_bytes
            offered_bytes = constraints.offered_bytes(fleet.device(place.device).memory_bytes)
            if edges and needed_bytes > offered_bytes:
                raise UserError(
                    f"compression.feedback: device {place.device!r} keeps {kept_bytes} bytes, the gradients of "
                    f"{samples} samples, and needs {needed_bytes} with its stage, "
                    f"expected at most {offered_bytes}{constraints.after_headroom}"
                )


def _remembers(edge: Edge) -> bool:
    return edge.backward_compression is not None and edge.backward_compression.feedback


def _check_values(prepared: Prepared, edge: Edge) -> None:
    for name in edge.gradients:
        spec = value_spec(prepared.flow, name)
        if not spec.shape or spec.shape[0] != Affine(1):
            raise UserError(
                f"compression.feedback: value {name!r} from stage {edge.source} to {edge.target}: got shape "
                f"{list(spec.shape)}, expected the samples first: what is left out is kept by sample"
            )
