"""A plan document against figures computed anew, field by field.

First what a plan must be at all: known devices, each once, stages that cover the operators. Only then do figures mean
anything. `planner` and `notes` are words, and not judged.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from isthmus.errors import UserError
from isthmus.expected_loss import expected_increase
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.plans import Plan, Prediction, Replica, ReplicaSync, Stage
from isthmus.verification.certificate import PlanCost, Until, check_certificate
from isthmus.verification.cutting import CutGraph, Flowing, Part, cut
from isthmus.verification.feeding import check_copies, copied_stages, copies_sums, timed
from isthmus.verification.packing import least_bytes, packed_bytes
from isthmus.verification.price import paid
from isthmus.verification.question import CLOSE, BoundCheck, DifferenceList, Question, Verdict
from isthmus.verification.reading import GraphReading
from isthmus.verification.sums import Members, averaging_groups, buffer_bytes, sums_s, well_formed
from isthmus.verification.timing import StepTiming

_UNCHECKED = BoundCheck(status="unchecked", text="not checked: this is no plan for the problem")


def verify(
    plan: Plan,
    question: Question,
    *,
    until: Until | None = None,
    simulated_s: Callable[[Plan], float] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Every figure of the document beside one computed from the graph and the fleet alone, and then its bound.

    `until` ends the check of the bound. `simulated_s` tells seconds of a simulated step, which documents of planned
    jobs state; without it these are not judged. `tell` hears what is done.

    Raises UserError where the graph itself cannot be planned; what is wrong with the document is in the verdict.
    """
    ledger, reading = DifferenceList(), GraphReading(question)
    graphs = _cut_as_stated(ledger, plan, reading) if _structure(ledger, plan, reading) else None
    if graphs is None:
        return Verdict(checked=ledger.checked, differences=tuple(ledger.differences), bound=_UNCHECKED)
    pipelines: list[StepTiming] = []
    for number, (replica, graph) in enumerate(zip(plan.replicas, graphs, strict=True)):
        where = f"replicas[{number}]"
        for index, (stage, part) in enumerate(zip(replica.stages, graph.parts, strict=True)):
            _stage(ledger, f"{where}.stages[{index}]", stage, part, replica.schedule.in_flight[index])
            allowed = question.recompute or not stage.recompute
            ledger.judge(f"{where}.stages[{index}].recompute", allowed, stage.recompute, "false: the job forbids it")
            _ends(ledger, f"{where}.stages[{index}]", stage, reading)
        of_each = [k for k in copied_stages(question, len(replica.stages)) for _ in question.constraints.feeders[1:]]
        for index, (copy, k) in enumerate(zip(replica.copies, of_each, strict=True)):
            _stage(ledger, f"{where}.copies[{index}]", copy, graph.parts[k], replica.schedule.in_flight[k])
            ledger.same(f"{where}.copies[{index}].recompute", copy.recompute, replica.stages[k].recompute)
            _ends(ledger, f"{where}.copies[{index}]", copy, reading)
        _memory(ledger, where, replica, graph, question)
        _edges(ledger, where, replica, graph, question if plan.certificate is not None else None)
        _shared(ledger, where, replica, graph)
        weights = [0 if s.recompute else p.apart_flops for s, p in zip(replica.stages, graph.parts, strict=True)]
        stated = list(replica.schedule.weight_flops) or [0] * len(replica.stages)
        ledger.same(f"{where}.schedule.weight_flops", str(stated), str(weights))
        packed = graph._replace(flowing=tuple(_packed(f, replica) for f in graph.flowing))
        again = [stage.recompute for stage in replica.stages]
        pipelines.append(timed(question, packed, [stage.device for stage in replica.stages], again))
    averaging_s = _sync(ledger, plan, graphs, question)
    step_s = _predicted(ledger, plan, pipelines, averaging_s)
    if plan.predicted.steady_s and simulated_s is not None and not ledger.differences:
        ledger.close("predicted.steady_s", plan.predicted.steady_s, simulated_s(plan))
    sync = (
        plan.sync if not ledger.differences else ReplicaSync()
    )  # what is not well formed has no rounds to be paid for
    shares = [r.micro_batches for r in plan.replicas]
    _limits(ledger, question, step_s, paid(question.fleet, pipelines, shares, sync, step_s))
    _loss(ledger, plan, question)
    tell(f"{ledger.checked} figures computed again, {len(ledger.differences)} of them differ")
    steady_s = plan.predicted.steady_s
    cost = PlanCost(steady_s, paid(question.fleet, pipelines, shares, sync, steady_s))
    bound = check_certificate(ledger, question, plan.certificate, cost, until)
    return Verdict(checked=ledger.checked, differences=tuple(ledger.differences), bound=bound)


def _limits(ledger: DifferenceList, question: Question, step_s: float, price: float) -> None:
    """A step no longer, or no dearer, than was asked."""
    longest, dearest = question.constraints.max_step_s, question.constraints.max_price
    if longest is not None:
        ledger.judge("constraints.max_step_s", step_s <= longest * (1 + CLOSE), step_s, f"at most {longest:g}")
    if dearest is not None:
        most = f"at most {dearest:g} for 1,000 steps"
        ledger.judge("constraints.max_price", 1000 * price <= dearest * (1 + CLOSE), 1000 * price, most)


def _loss(ledger: DifferenceList, plan: Plan, question: Question) -> None:
    """No more expected than the budget: each packed message of a replica counts by the replica's share of the batch."""
    asked = question.constraints.compression
    if asked is None or asked.loss_budget is None:
        return
    expected = sum(
        expected_increase(packed.packing) * replica.micro_batches / question.micro_batches
        for replica in plan.replicas
        for edge in replica.edges
        for packed in (edge.forward_compression, edge.backward_compression)
        if packed is not None
    )
    within = expected <= asked.loss_budget + CLOSE
    ledger.judge("constraints.compression.loss_budget", within, expected, f"at most {asked.loss_budget:g}")


def _structure(ledger: DifferenceList, plan: Plan, reading: GraphReading) -> bool:
    """Return whether the document is a plan for this problem at all."""
    question = reading.question
    ledger.same("model", plan.model, question.graph.name)
    ledger.same("fleet", plan.fleet, question.fleet.name)
    ledger.same("constraints.objective", plan.constraints.objective, question.constraints.objective)
    ledger.same("constraints.compression", str(plan.constraints.compression), str(question.constraints.compression))
    ledger.same("constraints.lacking", str(plan.constraints.lacking), str(question.constraints.lacking))
    ledger.same("constraints.memory_headroom", plan.constraints.memory_headroom, question.constraints.memory_headroom)
    ledger.same("constraints.max_step_s", plan.constraints.max_step_s, question.constraints.max_step_s)
    ledger.same("constraints.max_price", plan.constraints.max_price, question.constraints.max_price)
    held = [
        ledger.same(
            "constraints.data_holders",
            ", ".join(plan.constraints.data_holders),
            ", ".join(question.constraints.data_holders),
        ),
        ledger.same(
            "constraints.own_samples", str(plan.constraints.own_samples), str(question.constraints.own_samples)
        ),
        ledger.same("constraints.labels_stay", plan.constraints.labels_stay, question.constraints.labels_stay),
        ledger.same("micro_batch_size", plan.micro_batch_size, question.micro_batch_size),
        ledger.same("micro_batches", plan.micro_batches, question.micro_batches),
        ledger.judge("replicas", bool(plan.replicas), len(plan.replicas), "at least one"),
        ledger.same(
            "replicas: micro_batches in sum", sum(r.micro_batches for r in plan.replicas), question.micro_batches
        ),
    ]
    for name, uses in Counter(name for r in plan.replicas for name in {s.device for s in r.workers}).items():
        held.append(ledger.judge(f"device {name!r}", uses == 1, f"{uses} replicas", "one replica"))
        held.append(ledger.judge(f"device {name!r}", name in question.fleet.names, name, "a device of the fleet"))
    if question.constraints.copied:
        held.append(ledger.same("replicas", len(plan.replicas), 1))
        held.append(ledger.same("replicas: a parameter that copies do not sum", reading.not_summed, None))
    if reading.not_summed is not None:
        words = f"1: replicas sum in float32, and {reading.not_summed!r} is none"
        held.append(ledger.judge("replicas", len(plan.replicas) <= 1, len(plan.replicas), words))
    for number, replica in enumerate(plan.replicas):
        held += _replica(ledger, f"replicas[{number}]", replica, reading)
    return all(held)


def _replica(ledger: DifferenceList, where: str, replica: Replica, reading: GraphReading) -> list[bool]:
    count, schedule = len(replica.stages), replica.schedule
    held = [
        ledger.judge(f"{where}.micro_batches", replica.micro_batches >= 1, replica.micro_batches, "at least 1"),
        ledger.judge(f"{where}.stages", count > 0, count, "at least one"),
        ledger.same(f"{where}.schedule.name", schedule.name, reading.question.schedule),
        ledger.same(f"{where}.schedule.in_flight: entries", len(schedule.in_flight), count),
    ]
    for stage, limit in enumerate(schedule.in_flight):
        least = replica.micro_batches if schedule.name == "gpipe" else 1
        most = (2 if schedule.name == "delayed" else 1) * replica.micro_batches
        allowed, fits = f"{least} to {most}", least <= limit <= most
        held.append(ledger.judge(f"{where}.schedule.in_flight[{stage}]", fits, limit, allowed))
    starts = [0, *(stage.last + 1 for stage in replica.stages)]
    for index, stage in enumerate(replica.stages):
        name = f"{where}.stages[{index}]"
        held.append(ledger.same(f"{name}.first", stage.first, starts[index]))
        held.append(ledger.judge(f"{name}.last", stage.last >= stage.first, stage.last, "not before first"))
    held.append(ledger.same(f"{where}: operators in all stages", starts[-1], len(reading.operators)))
    held += _placed(ledger, where, replica, reading)
    held += check_copies(ledger, where, replica, reading)
    return held


def _placed(ledger: DifferenceList, where: str, replica: Replica, reading: GraphReading) -> Iterator[bool]:
    """No two neighbours on one device; data and labels where they may be read; operators where they are known."""
    names = [stage.device for stage in replica.stages]
    known = {op.target for op in reading.operators}
    for stage in replica.workers if reading.question.constraints.lacking else ():
        lacked = reading.question.constraints.lacked_by(stage.device)
        held = {op.target for op in reading.operators[stage.first : stage.last + 1]}
        missing = ", ".join(sorted(lacked - known or lacked & held))
        yield ledger.judge(f"{where}: device {stage.device!r}", not missing, stage.device, f"one that has {missing}")
    for index, (a, b) in enumerate(itertools.pairwise(names), 1):
        yield ledger.judge(f"{where}.stages[{index}].device", a != b, b, "another than that of the stage before")
    holders = reading.question.constraints.data_holders
    if not holders or not names:
        return
    expected = f"a data holder: {', '.join(holders)}"
    yield ledger.judge(f"{where}.stages[0].device", names[0] in holders, names[0], expected)
    if reading.labels_from is not None:
        last = f"{where}.stages[{len(names) - 1}]"
        yield ledger.judge(f"{last}.device", names[-1] in holders, names[-1], expected)
        start = replica.stages[-1].first
        in_time = start <= reading.labels_from
        yield ledger.judge(f"{last}.first", in_time, start, f"at most {reading.labels_from}, which takes labels")


def _memory(ledger: DifferenceList, where: str, replica: Replica, graph: CutGraph, question: Question) -> None:
    """Check the memory of each device, all its stages together."""
    needs: dict[str, tuple[str, int]] = {}
    for index, (stage, part) in enumerate(zip(replica.stages, graph.parts, strict=True)):
        words, before = needs.get(stage.device, ("", 0))
        words = f"{words} + stages[{index}]" if words else f"{where}.stages[{index}]"
        needs[stage.device] = words, before + part.memory_bytes(replica.schedule.in_flight[index], stage.recompute)
    feeders = question.constraints.feeders
    if question.constraints.copied:  # each has what the first has
        needs |= dict.fromkeys(feeders[1:], needs[feeders[0]])
    for device, (words, need) in needs.items():
        room = question.room_bytes(device)
        ledger.judge(f"{words}.memory", need <= room, need, f"at most {room} on {device}")


def _cut_as_stated(ledger: DifferenceList, plan: Plan, reading: GraphReading) -> list[CutGraph] | None:
    found: list[CutGraph] = []
    for number, replica in enumerate(plan.replicas):
        starts = [stage.first for stage in replica.stages]
        try:
            found.append(cut(reading, starts))
        except UserError as error:
            ledger.judge(f"replicas[{number}].stages", False, f"cuts at {starts[1:]}", str(error))
            return None
        loss = sum(start <= reading.loss for start in starts) - 1
        stated = len(starts) - 1 if replica.loss_stage == -1 else replica.loss_stage
        ledger.same(f"replicas[{number}].loss_stage", stated, loss)
    return found


def _stage(ledger: DifferenceList, where: str, stage: Stage, part: Part, in_flight: int) -> None:
    ledger.same(f"{where}.flops_forward", stage.flops_forward, part.forward_flops)
    ledger.same(f"{where}.flops_backward", stage.flops_backward, part.backward_work(stage.recompute))
    ledger.same(f"{where}.parameter_bytes", stage.parameter_bytes, part.parameter_bytes)
    ledger.same(f"{where}.memory.weights", stage.memory.weights, part.weights)
    ledger.same(f"{where}.memory.gradients", stage.memory.gradients, part.gradients)
    ledger.same(f"{where}.memory.optimizer", stage.memory.optimizer, part.optimizer)
    kept = in_flight * part.kept_bytes(stage.recompute)
    ledger.same(f"{where}.memory.activations", stage.memory.activations, kept)
    ledger.same(f"{where}.memory.recomputed", stage.memory.recomputed, part.saved_bytes if stage.recompute else 0)
    ledger.same(f"{where}.memory.working", stage.memory.working, part.working_bytes)


def _ends(ledger: DifferenceList, where: str, stage: Stage, reading: GraphReading) -> None:
    ledger.same(f"{where}.first_op", stage.first_op, reading.operators[stage.first].name)
    ledger.same(f"{where}.last_op", stage.last_op, reading.operators[stage.last].name)


def _edges(ledger: DifferenceList, where: str, replica: Replica, graph: CutGraph, bounded: Question | None) -> None:
    """`bounded`: the question of a document that states a bound, which is one of what the question's method packs."""
    stated = sorted((edge.source, edge.target) for edge in replica.edges)
    needed = {(f.source, f.target): f for f in graph.flowing}
    ledger.same(f"{where}.edges", _arrows(stated), _arrows(sorted(needed)))
    for edge in replica.edges:
        flow = needed.get((edge.source, edge.target))
        if flow is not None:
            name = f"{where}.edges[{edge.source} -> {edge.target}]"
            ledger.same(f"{name}.values", ", ".join(edge.values), ", ".join(flow.values))
            ledger.same(f"{name}.gradients", ", ".join(edge.gradients), ", ".join(flow.gradients))
            ledger.same(f"{name}.forward_bytes", edge.forward_bytes, flow.forward_bytes)
            ledger.same(f"{name}.backward_bytes", edge.backward_bytes, flow.backward_bytes)
            for field, stated, size_bytes in (
                ("forward_compression", edge.forward_compression, flow.forward_bytes),
                ("backward_compression", edge.backward_compression, flow.backward_bytes),
            ):
                if stated is not None:
                    expected = packed_bytes(flow, size_bytes, stated.packing)
                    ledger.same(f"{name}.{field}.wire_bytes", stated.wire_bytes, expected)
                    if bounded is not None:
                        _not_below(ledger, f"{name}.{field}.wire_bytes", stated.wire_bytes, flow, size_bytes, bounded)


def _not_below(
    ledger: DifferenceList, where: str, wire_bytes: int, flow: Flowing, size_bytes: int, question: Question
) -> None:
    asked = question.constraints.compression
    dense_bytes = [count * DTYPE_BYTES[dtype] for count, dtype in flow.packable]
    least = (
        size_bytes
        - sum(dense_bytes)
        + sum(least_bytes(asked, *tensor, dense) for tensor, dense in zip(flow.packable, dense_bytes, strict=True))
    )
    method = "no compression" if asked is None else str(asked)
    ledger.judge(where, wire_bytes >= least, wire_bytes, f"at least {least}: the bound is one for {method}")


def _packed(flow: Flowing, replica: Replica) -> Flowing:
    """Return `flow` with its tensors compressed as the document says."""
    edge = next((e for e in replica.edges if (e.source, e.target) == (flow.source, flow.target)), None)
    if edge is None:
        return flow
    there, back = edge.forward_compression, edge.backward_compression
    return flow._replace(
        forward_bytes=there.wire_bytes if there else flow.forward_bytes,
        backward_bytes=back.wire_bytes if back else flow.backward_bytes,
    )


def _arrows(pairs: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{a} -> {b}" for a, b in pairs) or "none"


def _shared(ledger: DifferenceList, where: str, replica: Replica, graph: CutGraph) -> None:
    needed = {p.name: p for p in graph.shared_uses}
    stated = sorted(p.name for p in replica.shared)
    ledger.same(f"{where}.shared", ", ".join(stated) or "none", ", ".join(sorted(needed)) or "none")
    for p in replica.shared:
        shared_uses = needed.get(p.name)
        if shared_uses is not None:
            ledger.same(f"{where}.shared[{p.name}].owner", p.owner, shared_uses.owner)
            ledger.same(f"{where}.shared[{p.name}].users", str(list(p.users)), str(list(shared_uses.users)))
            ledger.same(f"{where}.shared[{p.name}].size_bytes", p.size_bytes, shared_uses.size_bytes)
            gradient = f"{where}.shared[{p.name}].gradient_bytes"
            ledger.same(gradient, p.gradient_bytes, shared_uses.gradient_bytes)


def _sync(ledger: DifferenceList, plan: Plan, graphs: Sequence[CutGraph], question: Question) -> float:
    """Seconds of the sums as stated; every parameter must be summed once in a period by those who hold it."""
    held = [([stage.device for stage in r.stages], g) for r, g in zip(plan.replicas, graphs, strict=True)]
    several = len(plan.replicas) > 1
    period = ledger.same("sync.period", plan.sync.period, question.period if several else 1)
    if several:
        summed, asked = plan.sync.averages, "gradients" if question.gradients else "parameters or deltas"
        ledger.judge("sync.averages", (summed == "gradients") == question.gradients, summed, asked)
    needed = averaging_groups(held)
    if question.constraints.copied:
        needed = _summed_by_copies(ledger, plan, copies_sums(question, graphs[0]), question.constraints.feeders)
    stated: dict[Members, list[str]] = {}
    for group in plan.sync.groups:
        stated.setdefault((group.devices, group.stages), []).extend(group.parameters)
    agree = [
        ledger.same(
            f"sync: what {', '.join(members[0])} sum",
            ", ".join(sorted(stated.get(members, []))),
            ", ".join(sorted(needed.get(members, []))),
        )
        for members in sorted({*needed, *stated})
    ]
    if not (period and all(agree)):
        return 0.0
    proven = None if plan.certificate is None else question.fleet
    words = "each member once" if proven is None else "each member once, by region where a bound is stated"
    formed = [
        ledger.judge(f"sync.groups[{k}].collective", well_formed(g, proven), str(g.collective.islands), words)
        for k, g in enumerate(plan.sync.groups)
    ]
    if not all(formed):
        return 0.0
    for number, group in enumerate(plan.sync.groups):
        where = f"sync.groups[{number}]"
        size_bytes = buffer_bytes(graphs[0], group.parameters, plan.sync.averages)
        ledger.same(f"{where}.size_bytes", group.size_bytes, size_bytes)
        legal = 0 < len(group.iterations) == len(set(group.iterations)) and max(group.iterations) < plan.sync.period
        ledger.judge(f"{where}.iterations", legal, str(list(group.iterations)), f"some of 0..{plan.sync.period - 1}")
    return sums_s(question.fleet, plan.sync)


def _summed_by_copies(
    ledger: DifferenceList, plan: Plan, sums: dict[int, list[str]], feeders: tuple[str, ...]
) -> dict[Members, list[str]]:
    """Return the parameters that the copies of a stage sum, by their devices and stages."""
    ledger.same("sync.averages", plan.sync.averages, "gradients")
    return {(feeders, (stage,) * len(feeders)): names for stage, names in sums.items()}


def _predicted(ledger: DifferenceList, plan: Plan, timed: Sequence[StepTiming], averaging_s: float) -> float:
    """The step time as computed here."""
    shares = [(r.schedule.in_flight, r.micro_batches) for r in plan.replicas]
    steps_s = [t.step_s(*share) for t, share in zip(timed, shares, strict=True)]
    slowest_s, said = max(steps_s), plan.predicted
    # Equal replicas: the document may speak of any of them.
    tied = [k for k, s in enumerate(steps_s) if s >= slowest_s * (1 - CLOSE)]
    periods_s = {k: timed[k].periods_s(*shares[k]) for k in tied}
    meant = min(tied, key=lambda k: _distance(said, timed[k].fill_s, periods_s[k]))
    period_s = max(periods_s[meant].values())
    ledger.close("predicted.step_s", said.step_s, slowest_s + averaging_s)
    ledger.close("predicted.period_s", said.period_s, period_s)
    ledger.close("predicted.fill_s", said.fill_s, timed[meant].fill_s)
    ledger.same("predicted.micro_batches", said.micro_batches, plan.replicas[meant].micro_batches)
    ledger.close("predicted.sync_s", said.sync_s, averaging_s)
    eq3_s = max(t.eq3_s(share[1]) for t, share in zip(timed, shares, strict=True))
    ledger.close("predicted.eq3_step_s", said.eq3_step_s, eq3_s + averaging_s)
    longest = [name for name, seconds in periods_s[meant].items() if seconds >= period_s * (1 - CLOSE)]
    ledger.judge("predicted.bottleneck", said.bottleneck in longest, said.bottleneck, " or ".join(longest))
    return slowest_s + averaging_s


def _distance(said: Prediction, fill_s: float, periods_s: dict[str, float]) -> tuple[bool, float]:
    return said.bottleneck not in periods_s, abs(said.fill_s - fill_s) + abs(said.period_s - max(periods_s.values()))
