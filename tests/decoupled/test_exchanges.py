"""A pipeline gives and takes between two steps, and goes on computing while it gives."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.accelerators import HOST
from isthmus.api.make_plan import plan_for, steady_on
from isthmus.errors import PeerError
from isthmus.fleet import Fleet
from isthmus.graph import StageGraph
from isthmus.job import Prepared, prepare
from isthmus.plans import Plan
from isthmus.programs.merger import MergeTrace
from isthmus.protocol.decoupled_events import NEVER, CollectChanges, Contributed, FragmentSent, StepsMade
from isthmus.protocol.run_messages import Halt, Item, OpenItem, WeightExchange
from isthmus.runtime.coordinator.backend import LocalBackend
from isthmus.runtime.coordinator.run import RunOptions, Watcher
from isthmus.runtime.decoupled import run as decoupled_run
from isthmus.runtime.decoupled.merged_run import merged_fragments, pipeline_prepared, replica_groups, seeded_model
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaPlace
from isthmus.runtime.device.weight_exchange import OpenedExchange, StageExchanges
from isthmus.training.decoupled import delta_codec
from isthmus.training.engine import Engine

from .small import job_of
from .test_pipelines import FLEET, pipeline_job


class _Link(MergerLink):
    """Keeps what is put, and connects to nobody."""

    def __init__(self) -> None:
        self.received = queue.SimpleQueue()
        self.sent: list[tuple[object, Sequence[Tensor]]] = []

    def put(self, body: object, tensors: list[Tensor] | None = None) -> None:
        self.sent.append((body, tensors or []))

    def close(self) -> None:
        pass

    @property
    def contributions(self) -> list[tuple[Contributed, Sequence[Tensor]]]:
        return [(body, tensors) for body, tensors in self.sent if isinstance(body, Contributed)]


def test_a_pipeline_gives_the_weights_after_which_it_was_asked_while_the_next_step_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job_of(replicas="regions", codec="none")
    job, link = msgspec.structs.replace(pipeline_job(), sync=asked.sync), _Link()
    merged = merged_fragments(job)
    for fragment, values in enumerate(merged.known):
        sent = FragmentSent(fragment=fragment, merge=0, whole=True, included=NEVER, first=True, samples=0)
        link.received.put((sent, [values]))
    taken = FragmentSent(fragment=1, merge=1, whole=True, included=NEVER, first=False, samples=24)

    def run_plan(
        prepared: Prepared, plan: Plan, fleet: Fleet, folder: Path, options: RunOptions, watcher: Watcher
    ) -> None:
        exchanges, weights = options.exchanges, options.weights
        assert exchanges is not None and weights is not None
        first, second, third = (Item(index=n, kind="train", step=n) for n in range(3))
        assert not exchanges.opened(first).exchange.wanted
        link.received.put((CollectChanges(merge=1, fragments=(0,), last=False), []))
        link.received.put((taken, [merged.known[1] + 1]))
        watcher.advanced(first, 1.0, ())
        assert isinstance(link.sent[-1][0], StepsMade)
        opened = exchanges.opened(second)
        assert opened.amounts
        for amount in opened.amounts.values():
            torch.testing.assert_close(amount, torch.ones_like(amount))
        wanted = opened.exchange.wanted
        assert set(opened.amounts).isdisjoint(wanted)
        for number, name in enumerate(wanted):
            assert not link.contributions, f"{number} of {len(wanted)} parameters are enough"
            exchanges.collected(second, {name: weights[name] - 0.25})
        exchanges.collected(second, {name: weights[name] for name in wanted})  # as when the step is made again
        ((given, (payload,)),) = link.contributions
        assert (given.steps, given.samples, given.fragments) == (1, (8,), (0,))
        assert [(version.fragment, version.steps) for version in given.taken][-1] == (1, 1)
        delta = merged.unpacked(0, payload, delta_codec(job.sync.decoupled))
        assert delta is not None
        torch.testing.assert_close(delta, torch.full_like(delta, 0.25))
        link.received.put((CollectChanges(merge=2, fragments=(0, 1), last=True), []))
        watcher.advanced(second, 1.0, ())
        wanted = exchanges.opened(third).exchange.wanted
        link.received.put((Halt(epoch=0), []))
        exchanges.collected(third, {name: weights[name] for name in wanted})
        pytest.fail("the replica has given for the last time, and goes on")

    monkeypatch.setattr(decoupled_run, "MergerLink", lambda place: link)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(decoupled_run, "run_plan", run_plan)
    prepared = pipeline_prepared(prepare(job), replica_groups(job, FLEET), "x")
    fleet = FLEET.subset(["a", "b", "c"])
    known = decoupled_run.ReplicaPipeline(
        prepared=prepared,
        module=seeded_model(job),
        plan=plan_for(prepared, fleet, proving=None),
        fleet=fleet,
        replan=partial(plan_for, prepared, proving=None),
        steady_s=partial(steady_on, prepared),
        folder=tmp_path,
        trace=MergeTrace(),
        backend=LocalBackend(),
    )
    place = ReplicaPlace(name="x", run="r", address="127.0.0.1:1", timeout_s=60.0)
    decoupled_run.PipelineReplica(job, known, place).run()
    assert [body.steps for body, _ in link.contributions] == [1, 2]


class _Engine:
    """Two parameters of the stage."""

    owned = ("a", "b")
    accelerator = HOST

    def __init__(self) -> None:
        self.held = {"op_a": torch.zeros(2), "op_b": torch.ones(2)}

    def parameters(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.held[name] for name in names}

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.held[name].copy_(value)


def test_a_stage_adds_amounts_before_the_step_and_its_state_is_still_that_of_whole_steps() -> None:
    engine, read = _Engine(), list[tuple[int, dict[str, list[float]]]]()
    spec = SimpleNamespace(shape_at=lambda _: (2,))
    operators = [SimpleNamespace(target=name, name=f"op_{name}", outputs=(spec,)) for name in "ab"]
    train = SimpleNamespace(variables=lambda: operators, shared_from={})
    exchanges = StageExchanges(
        cast(Engine, engine),
        cast(StageGraph, train),
        8,
        lambda item, weights: read.append((item, {name: value.tolist() for name, value in weights.items()})),
    )
    order = OpenItem(item=Item(index=3, kind="train", step=2), epoch=0)
    exchange = WeightExchange(rate_step=7, wanted=("a", "b", "others"))
    exchanges.opened(OpenedExchange(order, exchange, {"a": torch.tensor([1.0, 2.0]), "others": torch.ones(1)}))
    exchanges.begin(2)  # a snapshot of the steps before
    assert not exchanges.before and engine.held["op_a"].tolist() == [0, 0]
    for _ in range(2):  # each tasklet of the step
        exchanges.begin(3)
    assert engine.held["op_a"].tolist() == [1, 2]
    assert read == [(3, {"a": [1, 2], "b": [1, 1]})]
    assert {name: value.tolist() for name, value in exchanges.before.items()} == {"a": [0, 0]}
    assert exchanges.end(2) == 7
    assert not exchanges.before
    assert exchanges.end(3) == 3
    several = torch.tensor([2.0**24, 2.0**24, 1.0, 1.0, 1.0, 1.0])  # their sum leads to 2^24 + 4, twice
    exchanges.opened(OpenedExchange(order, exchange, {"a": several}))
    exchanges.begin(3)
    assert engine.held["op_a"].tolist() == [2.0**24, 2.0**24 + 4]
    for wrong in (torch.ones(3), torch.ones(0)):
        with pytest.raises(PeerError, match=r"sent amounts \[.\] of a \[2\]"):
            exchanges.opened(OpenedExchange(order, exchange, {"a": wrong}))
