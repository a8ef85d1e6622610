"""Whether a stage computes each sample by itself, so that its samples can be shared out."""

from __future__ import annotations

from isthmus.graph.opgraph import Op, Ref, TensorSpec
from isthmus.graph.partition import StageGraph

SIZES = (12, 24)  # numbers of samples at which shapes are compared


def mixes(stage: StageGraph, *, synchronised: bool = False) -> Op | None:
    """The first operator by which a sample's values depend on other samples; None where there is none.

    What is computed over all samples, as a loss is, may only go into more of that kind: not back into values that each
    sample has its own of, and not to another stage. By shapes, and by name where batches are normalised: a value that
    has each sample's own in another order passes for one that does not mix them. Batch norm does not mix where it
    is `synchronised`: computed over all samples wherever they are; then other statistics that are kept of samples do.
    """
    here = {op.name for op in stage.ops}
    received = {crossing.value: crossing.spec for crossing in stage.receives}
    own = {value for value, spec in received.items() if is_shared_out(spec)}
    over_all: dict[Ref, Op] = {}
    for op in stage.ops:
        refs = op.refs()
        own |= {ref for ref in refs if ref.op not in here and ref not in received}  # columns of the batch
        source = next((over_all[ref] for ref in refs if ref in over_all), None)
        if source is None and own.isdisjoint(refs):
            continue
        if (op.mutates and not _normalises_batches(op)) if synchronised else _normalises_batches(op):
            return op
        for index, spec in enumerate(op.outputs):
            if not is_shared_out(spec):
                over_all[Ref(op.name, index)] = source or op
            elif source is not None:
                return source
            else:
                own.add(Ref(op.name, index))
    return next((over_all[c.value] for c in stage.sends if c.value in over_all), None)


def sample_axis(spec: TensorSpec) -> int | None:
    """The only axis that grows with the samples, if it has one element for each."""
    few, many = (spec.shape_at(size) for size in SIZES)
    grown = [axis for axis, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and (few[grown[0]], many[grown[0]]) == SIZES else None


def _normalises_batches(op: Op) -> bool:
    """Return whether it normalises by the batch's own mean and variance, as in training, and not by kept ones."""
    return op.target.startswith("aten.batch_norm.") and op.args[5] is True


def is_shared_out(spec: TensorSpec) -> bool:
    """Return whether one axis, and only one, is in proportion to the number of samples."""
    few, many = (spec.shape_at(size) for size in SIZES)
    grown = [(a, b) for a, b in zip(few, many, strict=True) if a != b]
    return len(grown) == 1 and grown[0][0] * SIZES[1] == grown[0][1] * SIZES[0]
