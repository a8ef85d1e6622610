"""The baseline of Sky Computing (section IV-A): the same number of layers on every device, in the order given."""

from __future__ import annotations

from isthmus.planners.baselines.allocation.problem import Allocation, LayerProblem, allocation


def even_layers(problem: LayerProblem) -> Allocation:
    """Counts that differ by one at most, the larger ones first; with more devices than layers the last get none.

    Knows neither speed nor memory, as in the paper. Raises FleetTooSmall where a device cannot hold its share.
    """
    return allocation(problem, range(problem.devices), even_counts(problem))


def even_counts(problem: LayerProblem) -> list[int]:
    share, left = divmod(problem.layers, problem.devices)
    return [share + (device < left) for device in range(problem.devices)]
