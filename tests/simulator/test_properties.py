"""Whatever the pipeline, the limits, the timing and the order of simultaneous events: all work is done, once."""

from collections import Counter, defaultdict
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_edge, make_fleet, make_plan, names

from isthmus.fleet import Fleet, Link, Links, Route
from isthmus.plans import Plan, SharedParameter
from isthmus.protocol import RunSpec, StageView, items
from isthmus.protocol.views import stage_views
from isthmus.simulator import Fault, SimulatedRun, SimulationOptions, simulate_run
from isthmus.trace import Span, link_bytes


class Case(msgspec.Struct, frozen=True):
    plan: Plan
    fleet: Fleet
    spec: RunSpec
    options: SimulationOptions

    @property
    def views(self) -> tuple[StageView, ...]:
        return stage_views(self.plan.replica, clips=False, counts=False, eval_edges=self.options.eval_edges)

    def run(self, **changes: object) -> SimulatedRun:
        options = msgspec.structs.replace(self.options, **changes)
        return simulate_run(self.plan, self.fleet, self.spec, options)


@st.composite
def plans(draw: st.DrawFn, stages: int, micro_batches: int) -> Plan:
    """Any edges onward, with or without gradients; any limits; some parameters shared either way."""
    number = st.integers(0, stages - 1)
    edges = [
        make_edge(s, t, draw(st.integers(0, 2000)), gradients=draw(st.booleans()))
        for t in range(stages)
        for s in range(t)
        if draw(st.booleans())
    ]
    shared = [
        SharedParameter(
            name=f"w{k}",
            owner=draw(number),
            users=tuple(draw(st.sets(number, min_size=1))),
            size_bytes=9,
            gradient_bytes=18,
        )
        for k in range(draw(st.integers(0, 2)))
    ]
    seconds = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=stages, max_size=stages))
    return make_plan(
        seconds,
        edges,
        weights=[draw(st.integers(0, backward)) for _, backward in seconds] if draw(st.booleans()) else (),
        micro_batches=micro_batches,
        in_flight=draw(st.lists(st.integers(1, micro_batches + 1), min_size=stages, max_size=stages)),
        shared=shared,
        loss_stage=draw(st.integers(-1, stages - 1)),
    )


@st.composite
def fleets(draw: st.DrawFn, stages: int) -> Fleet:
    link = st.builds(Link, st.sampled_from([0.0, 0.001, 0.3]), st.sampled_from([1e3, 1e5, 1e30]))
    routes = tuple(Route(a, b, draw(link)) for a in names(stages) for b in names(stages) if a != b)
    return msgspec.structs.replace(make_fleet(stages), links=Links(devices=routes))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stages, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    pairs = [(s, t) for t in range(stages) for s in range(t)]
    eval_edges = st.dictionaries(st.sampled_from(pairs), st.integers(0, 99)) if pairs else st.none()
    spec = RunSpec(
        steps=draw(st.integers(1, 3)),
        micro_batches=micro_batches,
        micro_batch_size=1,
        eval_every=draw(st.integers(0, 2)),
        eval_micro_batches=draw(st.integers(1, 8)),
        save_every=draw(st.integers(0, 2)),
        lease_ahead=draw(st.integers(1, 3)),
    )
    options = SimulationOptions(
        clips=draw(st.booleans()),
        counts=draw(st.booleans()),
        eval_edges=draw(st.none() | eval_edges),
        update_s=draw(st.sampled_from([0.0, 0.1])),
        control_latency_s=draw(st.sampled_from([0.0, 0.05])),
        jitter=draw(st.sampled_from([0.0, 0.1, 1.0])),
        seed=draw(st.integers(0, 1000)),
    )
    return Case(draw(plans(stages, micro_batches)), draw(fleets(stages)), spec, options)


def expected_tasklets(case: Case) -> Counter[tuple[str, str, int, int]]:
    """(device, name, step, micro-batch) of everything that must be computed."""
    return Counter(
        (f"d{view.stage}", name, item.step, m)
        for view in case.views
        for item in items(case.spec)
        for name in {"train": ["F"] + ["B"] * view.trains + ["W"] * (view.trains and view.splits), "eval": ["E"]}.get(
            item.kind, []
        )
        for m in range(item.micro_batches)
    )


def by_device(spans: tuple[Span, ...]) -> dict[str, list[Span]]:
    """The compute lane of each device, in order."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.track == "compute":
            lanes[span.device].append(span)
    return lanes


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_item_is_done_once_by_every_stage(case: Case):
    run = case.run()
    sequence = list(items(case.spec))
    assert run.finish.outcome == "done"
    assert run.coordinator.finished == len(sequence)
    assert [w.item for w in run.workers] == [len(sequence) - 1] * len(run.workers)
    tasklets = (s for s in run.trace.spans if s.track == "compute" and s.name in ("F", "B", "W", "E"))
    assert Counter((s.device, s.name, s.step, s.micro_batch) for s in tasklets) == expected_tasklets(case)
    for name, kind in (("update", "train"), ("save", "save")):
        steps = [item.step for item in sequence if item.kind == kind]
        for lane in by_device(run.trace.spans).values():
            assert [s.step for s in lane if s.name == name] == steps


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_lane_does_one_thing_at_a_time_within_its_limit(case: Case):
    lanes = by_device(case.run().trace.spans)
    for view in case.views:
        lane = lanes[f"d{view.stage}"]
        assert all(a.end_s <= b.start_s for a, b in pairwise(lane))
        held: set[tuple[int, int]] = set()
        for span in lane:
            key = (span.step, span.micro_batch)
            if span.name == "F" and view.trains:
                held.add(key)
                assert len(held) <= view.in_flight
            elif span.name == ("W" if view.splits else "B"):
                held.remove(key)  # its forward came first
            elif span.name == "update":
                assert not held


@settings(max_examples=150, deadline=None)
@given(cases())
def test_nothing_starts_before_what_it_needs_has_arrived(case: Case):
    run = case.run()
    received = [s for s in run.trace.spans if s.track == "receive"]
    ends = {(s.device, s.name, s.other, s.step, s.micro_batch): s.end_s for s in received}
    updates = {(s.device, s.step): s.start_s for s in run.trace.spans if s.name == "update"}
    for view in case.views:
        device = f"d{view.stage}"
        for span in by_device(run.trace.spans)[device]:
            parcel, sources = {"F": ("forward", view.forward_from), "B": ("backward", view.backward_from)}.get(
                span.name, ("", ())
            )
            for source in sources:
                assert ends[device, parcel, f"d{source}", span.step, span.micro_batch] <= span.start_s
            for owner in view.parameter_owners if span.name == "F" else ():
                assert ends[device, "shared", f"d{owner}", span.step, -1] <= span.start_s
    for (device, name, _, step, _), end_s in ends.items():
        if name in ("shared_gradient", "norms", "count"):
            assert end_s <= updates[device, step]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_every_parcel_travels_once(case: Case):
    run = case.run()
    received = sum(s.size_bytes for s in run.trace.spans if s.track == "receive")
    (replica,) = case.plan.replicas
    train = sum(item.kind == "train" for item in items(case.spec))
    evaluated = [item for item in items(case.spec) if item.kind == "eval"]
    per_eval = case.options.eval_edges
    eval_bytes = sum(per_eval.values()) if per_eval is not None else sum(e.forward_bytes for e in replica.edges)
    lent = [p for p in replica.shared for user in p.users if user != p.owner]
    stages = len(replica.stages)
    expected = (
        train * case.spec.micro_batches * sum(e.forward_bytes + e.backward_bytes for e in replica.edges)
        + sum(item.micro_batches for item in evaluated) * eval_bytes
        + (train + len(evaluated)) * sum(p.size_bytes for p in lent)
        + train * sum(p.gradient_bytes for p in lent)
        + train * stages * (stages - 1) * 64 * case.options.clips
        + train * (stages - 1) * 16 * case.options.counts
    )
    assert sum(link_bytes(run.trace).values()) == received == expected


@settings(max_examples=50, deadline=None)
@given(cases())
def test_the_same_seed_gives_the_same_run(case: Case):
    assert case.run() == case.run()


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_a_loss_at_any_time_ends_the_run_and_changes_nothing_before(case: Case, data: st.DataObject):
    whole = case.run()
    device = data.draw(st.sampled_from(names(len(case.views))))
    time_s = data.draw(st.floats(0, max(s.end_s for s in whole.trace.spans)))
    run = case.run(faults=(Fault(device=device, time_s=time_s),))
    assert run.finish.outcome == "lost" or run == whole
    lane = by_device(run.trace.spans)[device]
    assert all(s.end_s <= time_s for s in lane) or run == whole
    computed = [[s for s in r.trace.spans if s.track == "compute" and s.end_s < time_s] for r in (run, whole)]
    assert computed[0] == computed[1]
