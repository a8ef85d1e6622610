"""A planner in 30 lines: every machine gets a share of the model in proportion to its speed, fastest first.

A job names it: planner = "planner:proportional". Compare it: isthmus plan job.toml --compare planner:proportional,auto
"""

from isthmus.cost import Problem, build_plan
from isthmus.planners import legal_places
from isthmus.plans import Plan


def proportional(problem: Problem) -> Plan:
    """Shares of the model's FLOPs in proportion to speed; link speeds are not looked at."""
    devices = sorted(problem.fleet.devices, key=lambda device: -device.sustained_flops_per_s)
    total = sum(device.sustained_flops_per_s for device in devices)
    places = legal_places(problem)  # before which operators the model may be cut
    flops = problem.cumulative_flops  # of the operators before each place
    cuts: list[int] = []
    share = 0.0
    for device in devices[:-1]:
        share += device.sustained_flops_per_s / total
        later = [place for place in places if place > (cuts[-1] if cuts else 0)]
        if not later:
            break
        cuts.append(min(later, key=lambda place: abs(flops[place] - share * flops[-1])))
    order = [device.name for device in devices[: len(cuts) + 1]]
    return build_plan(problem, order, cuts, planner="proportional")
