"""Each test is a journey: what happens to one stage, and what it then asks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs
from tests.programs.ports import Asked, Recorder

from isthmus.errors import InternalError
from isthmus.plans.collective import CollectiveMessage, Parts, Round
from isthmus.protocol import Item, StageView, Worker
from isthmus.protocol.run_messages import Arrived, Parcel, PartsArrived, Work
from isthmus.protocol.worker import GroupView, StagePort
from isthmus.session.program import OutOfPhase

Event = Callable[[Worker], None]
Journey = list[tuple[Event, list[Asked]]]


def middle(**fields: object) -> StageView:
    """Stage 1 of 3 in a chain, unless `fields` say otherwise."""
    chain = {"forward_from": (0,), "forward_to": (2,), "backward_from": (2,), "backward_to": (0,)}
    return StageView(**{"stage": 1, "stages": 3, "in_flight": 2, **chain, **fields})


def alone(**fields: object) -> StageView:
    """The only stage that computes: nothing to wait for."""
    none = {"forward_from": (), "forward_to": (), "backward_from": (), "backward_to": ()}
    return middle(**{**none, **fields})


def opened(item: Item, epoch: int = 0) -> Event:
    return lambda worker: worker.opened(item, epoch)


def train(index: int = 0, micro_batches: int = 1, epoch: int = 0) -> Event:
    return opened(Item(index=index, kind="train", step=index, micro_batches=micro_batches), epoch)


def evaluate(index: int = 0, micro_batches: int = 1) -> Event:
    return opened(Item(index=index, kind="eval", step=0, micro_batches=micro_batches))


def save() -> Event:
    return opened(Item(index=0, kind="save", step=0))


def computed(work: Work, micro_batch: int, item: int) -> Event:
    return lambda worker: worker.computed(work, item, micro_batch)


def f(micro_batch: int, item: int = 0) -> Event:
    return computed("F", micro_batch, item)


def b(micro_batch: int, item: int = 0) -> Event:
    return computed("B", micro_batch, item)


def e(micro_batch: int, item: int = 0) -> Event:
    return computed("E", micro_batch, item)


def filled(item: int) -> Event:
    return lambda worker: worker.filled(item)


def taken(item: int) -> Event:
    return lambda worker: worker.taken(item)


def collected(item: int) -> Event:
    return lambda worker: worker.collected(item)


def updated(item: int) -> Event:
    return lambda worker: worker.updated(item)


def saved(item: int) -> Event:
    return lambda worker: worker.saved(item)


def kept(item: int) -> Event:
    return lambda worker: worker.kept(item)


def arrived(body: Arrived | PartsArrived) -> Event:
    return lambda worker: worker.arrived(body)


def activations(micro_batch: int, source: int = 0, item: int = 0) -> Event:
    return arrived(Arrived(parcel="forward", source=source, item=item, micro_batch=micro_batch))


def gradients(micro_batch: int, source: int = 2, item: int = 0) -> Event:
    return arrived(Arrived(parcel="backward", source=source, item=item, micro_batch=micro_batch))


def once(parcel: Parcel, source: int, item: int = 0) -> Event:
    return arrived(Arrived(parcel=parcel, source=source, item=item))


def parts(item: int) -> Event:
    return arrived(PartsArrived(group=7, round=0, source=3, item=item))


class Stage:
    """A worker, and what it asks."""

    def __init__(self, view: StageView, epoch: int = 0) -> None:
        self.port = Recorder(StagePort)
        self.worker = Worker(view, self.port.port, epoch)

    def after(self, event: Event) -> list[Asked]:
        event(self.worker)
        return self.port.took()


def travel(view: StageView, journey: Journey) -> None:
    stage = Stage(view)
    for number, (event, expected) in enumerate(journey):
        assert stage.after(event) == expected, f"event {number}"


def test_one_micro_batch_on_a_middle_stage():
    travel(
        middle(),
        [
            (train(), []),
            (activations(0), [("compute", "F", 0, 0)]),
            (f(0), [("send", "forward", 2, 0, 0)]),
            (gradients(0), [("compute", "B", 0, 0)]),
            (b(0), [("send", "backward", 0, 0, 0), ("collect", 0)]),
            (collected(0), [("update", 0, False)]),
            (updated(0), [("report", 0)]),
        ],
    )


def test_the_loss_stage_goes_back_at_once():
    last = middle(stage=2, forward_from=(1,), forward_to=(), backward_from=(), backward_to=(1,), has_loss=True)
    travel(
        last,
        [
            (train(micro_batches=2), []),
            (activations(0, 1), [("compute", "F", 0, 0)]),
            (activations(1, 1), []),
            (f(0), [("compute", "B", 0, 0)]),
            (b(0), [("send", "backward", 1, 0, 0), ("compute", "F", 0, 1)]),
        ],
    )


def test_backward_goes_before_forward():
    travel(
        middle(),
        [
            (train(micro_batches=3), []),
            (activations(0), [("compute", "F", 0, 0)]),
            (activations(1), []),
            (f(0), [("send", "forward", 2, 0, 0), ("compute", "F", 0, 1)]),
            (activations(2), []),
            (gradients(0), []),
            (f(1), [("send", "forward", 2, 0, 1), ("compute", "B", 0, 0)]),
        ],
    )


def test_of_two_ready_backwards_the_lower_micro_batch_goes_first():
    travel(
        middle(),
        [
            (train(micro_batches=2), []),
            (activations(0), [("compute", "F", 0, 0)]),
            (activations(1), []),
            (f(0), [("send", "forward", 2, 0, 0), ("compute", "F", 0, 1)]),
            (gradients(1), []),
            (gradients(0), []),
            (f(1), [("send", "forward", 2, 0, 1), ("compute", "B", 0, 0)]),
        ],
    )


def test_a_late_gradient_delays_only_its_own_micro_batch():
    travel(
        middle(),
        [
            (train(micro_batches=2), []),
            (activations(0), [("compute", "F", 0, 0)]),
            (activations(1), []),
            (f(0), [("send", "forward", 2, 0, 0), ("compute", "F", 0, 1)]),
            (f(1), [("send", "forward", 2, 0, 1)]),
            (gradients(1), [("compute", "B", 0, 1)]),
            (gradients(0), []),
            (b(1), [("send", "backward", 0, 0, 1), ("compute", "B", 0, 0)]),
            (b(0), [("send", "backward", 0, 0, 0), ("collect", 0)]),
        ],
    )


def test_forwards_stop_at_the_limit_and_go_on_after_a_backward():
    travel(
        middle(in_flight=1),
        [
            (train(micro_batches=2), []),
            (activations(0), [("compute", "F", 0, 0)]),
            (activations(1), []),
            (f(0), [("send", "forward", 2, 0, 0)]),
            (gradients(0), [("compute", "B", 0, 0)]),
            (b(0), [("send", "backward", 0, 0, 0), ("compute", "F", 0, 1)]),
        ],
    )


def test_a_skip_connection_is_waited_for_on_both_ways():
    last_but_one = middle(stage=2, stages=4, forward_from=(0, 1), forward_to=(3,), backward_from=(3,), backward_to=(0,))
    travel(
        last_but_one,
        [
            (train(), []),
            (activations(0, 1), []),
            (activations(0, 0), [("compute", "F", 0, 0)]),
        ],
    )
    first = middle(stage=0, forward_from=(), forward_to=(1, 2), backward_from=(1, 2), backward_to=())
    travel(
        first,
        [
            (train(), [("compute", "F", 0, 0)]),
            (f(0), [("send", "forward", 1, 0, 0), ("send", "forward", 2, 0, 0)]),
            (gradients(0, 2), []),
            (gradients(0, 1), [("compute", "B", 0, 0)]),
        ],
    )


def test_a_frozen_stage_has_no_backward_and_no_limit():
    frozen = middle(stage=0, forward_from=(), forward_to=(1,), backward_from=(), backward_to=(), trains=False)
    travel(
        structs.replace(frozen, in_flight=1),
        [
            (train(micro_batches=2), [("compute", "F", 0, 0)]),
            (f(0), [("send", "forward", 1, 0, 0), ("compute", "F", 0, 1)]),
            (f(1), [("send", "forward", 1, 0, 1), ("collect", 0)]),
        ],
    )


def test_the_owner_of_a_shared_parameter_lends_first_and_collects_last():
    owner = alone(stage=0, parameter_users=(2,))
    travel(
        owner,
        [
            (train(), [("send", "shared", 2, 0, -1), ("compute", "F", 0, 0)]),
            (f(0), [("compute", "B", 0, 0)]),
            (b(0), []),
            (once("shared_gradient", 2), [("collect", 0)]),
        ],
    )


def test_a_borrower_waits_for_the_value_and_returns_the_gradient_once():
    joiner = alone(stage=2, parameter_owners=(0,))
    travel(
        joiner,
        [
            (train(micro_batches=2), []),
            (once("shared", 0), [("compute", "F", 0, 0)]),
            (f(0), [("compute", "B", 0, 0)]),
            (b(0), [("compute", "F", 0, 1)]),
            (f(1), [("compute", "B", 0, 1)]),
            (b(1), [("send", "shared_gradient", 0, 0, -1), ("collect", 0)]),
        ],
    )


def test_a_borrowed_value_is_of_one_step_only():
    travel(
        alone(stage=2, parameter_owners=(0,)),
        [
            (train(0), []),
            (once("shared", 0), [("compute", "F", 0, 0)]),
            (train(1), []),
            (f(0), [("compute", "B", 0, 0)]),
            (b(0), [("send", "shared_gradient", 0, 0, -1), ("collect", 0)]),
            (collected(0), [("update", 0, False)]),
            (updated(0), [("report", 0)]),
            (once("shared", 0, item=1), [("compute", "F", 1, 0)]),
        ],
    )


def test_clipping_waits_for_the_norms_of_all_others():
    travel(
        alone(clips=True),
        [
            (train(), [("compute", "F", 0, 0)]),
            (f(0), [("compute", "B", 0, 0)]),
            (once("norms", 2), []),
            (b(0), [("collect", 0)]),
            (collected(0), [("send", "norms", 0, 0, -1), ("send", "norms", 2, 0, -1)]),
            (once("norms", 0), [("update", 0, False)]),
        ],
    )


def test_the_loss_stage_tells_the_count_after_its_last_forward():
    travel(
        alone(stage=2, counts=True, has_loss=True),
        [
            (train(micro_batches=2), [("compute", "F", 0, 0)]),
            (f(0), [("compute", "B", 0, 0)]),
            (b(0), [("compute", "F", 0, 1)]),
            (f(1), [("send", "count", 0, 0, -1), ("send", "count", 1, 0, -1), ("compute", "B", 0, 1)]),
            (b(1), [("collect", 0)]),
        ],
    )


def test_the_others_collect_only_when_they_know_the_count():
    travel(
        alone(counts=True),
        [
            (train(), [("compute", "F", 0, 0)]),
            (f(0), [("compute", "B", 0, 0)]),
            (b(0), []),
            (once("count", 2), [("collect", 0)]),
        ],
    )


def test_an_evaluation_goes_forward_along_its_own_edges():
    travel(
        middle(in_flight=1, eval_from=(0,), eval_to=(2,), counts=True, clips=True),
        [
            (evaluate(micro_batches=2), []),
            (activations(0), [("compute", "E", 0, 0)]),
            (activations(1), []),
            (e(0), [("send", "forward", 2, 0, 0), ("compute", "E", 0, 1)]),
            (e(1), [("send", "forward", 2, 0, 1), ("report", 0)]),
        ],
    )


def test_an_evaluation_needs_shared_values_but_returns_no_gradient():
    travel(
        alone(parameter_owners=(0,), parameter_users=(2,)),
        [
            (evaluate(), [("send", "shared", 2, 0, -1)]),
            (once("shared", 0), [("compute", "E", 0, 0)]),
            (e(0), [("report", 0)]),
        ],
    )


def test_a_checkpoint_holds_the_lane_until_it_is_written():
    travel(
        alone(),
        [
            (save(), [("save", 0)]),
            (train(1), []),
            (saved(0), [("report", 0), ("compute", "F", 1, 0)]),
        ],
    )


def test_leased_items_start_without_asking():
    travel(
        alone(),
        [
            (evaluate(0), [("compute", "E", 0, 0)]),
            (evaluate(1), []),
            (train(2), []),
            (e(0), [("report", 0), ("compute", "E", 1, 0)]),
            (e(0, item=1), [("report", 1), ("compute", "F", 2, 0)]),
        ],
    )


def test_what_arrives_before_its_item_is_leased_is_kept():
    travel(
        middle(),
        [
            (activations(0), []),
            (train(), [("compute", "F", 0, 0)]),
        ],
    )


def test_what_has_arrived_is_forgotten_with_its_item():
    stage = Stage(middle(clips=True, parameter_users=(0,)))
    early = activations(0, item=1)
    for event in (train(), activations(0), early, f(0), gradients(0), once("norms", 0), once("norms", 2), b(0)):
        stage.after(event)
    for event in (once("shared_gradient", 0), collected(0), updated(0)):
        stage.after(event)
    assert stage.worker._arrived == {("forward", 1, 0): {0}}  # else a long run would fill the memory


def test_a_stale_epoch_is_dropped_and_counted():
    stage = Stage(alone(), epoch=1)
    assert stage.after(train()) == []
    assert stage.worker.statistics().stale == 1
    assert stage.after(train(epoch=1)) == [("compute", "F", 0, 0)]
    assert stage.after(activations(0)) == []
    assert stage.worker.statistics().stale == 2
    assert stage.worker.statistics().phase == "tasklets"


@pytest.mark.parametrize("halfway", [[train()], [train(), f(0), b(0)], [save()]], ids=["F", "collect", "save"])
def test_after_a_halt_nothing_more_is_asked_for(halfway: list[Event]):
    stage = Stage(alone())
    for event in halfway:
        stage.after(event)
    for late in (Worker.halt, f(0), b(0), collected(0), updated(0), saved(0), train(1), Worker.halt):
        assert stage.after(late) == []
    assert stage.worker.over


@pytest.mark.parametrize("end", [filled(0), taken(0), collected(0), updated(0), saved(0), kept(0)])
def test_an_end_that_was_not_asked_for_is_an_error(end: Event):
    stage = Stage(alone())
    stage.after(train())
    with pytest.raises(OutOfPhase, match="came in phase 'tasklets'"):
        stage.after(end)
    assert stage.after(f(0)) == [("compute", "B", 0, 0)]


def test_the_end_of_another_item_is_an_error():
    stage = Stage(alone())
    for event in (train(), f(0), b(0)):
        stage.after(event)
    with pytest.raises(InternalError, match="the end of 'collecting' of item 1, expected 0"):
        stage.after(collected(1))
    with pytest.raises(OutOfPhase, match="computed came in phase 'collecting'"):
        stage.after(b(0))
    assert stage.after(collected(0)) == [("update", 0, False)]


def test_statistics_name_the_item_in_work():
    stage = Stage(alone())
    assert stage.worker.statistics().item == -1
    stage.after(evaluate(0))
    assert stage.worker.statistics().item == 0
    stage.after(e(0))
    assert (stage.worker.statistics().item, stage.worker.statistics().phase) == (0, "idle")


def test_a_delayed_sum_goes_on_while_the_next_step_computes() -> None:
    """Summed with worker 3 after every step and used one step later; what is saved is complete."""
    turn = Round(
        sends=(CollectiveMessage(3, Parts(0, 1, 2)),), receives=(CollectiveMessage(3, Parts(1, 2, 2)),), adds=True
    )
    group = GroupView(group=7, rounds=(turn,))
    travel(
        alone(groups=(group,), averages="deltas", delay=1),
        [
            (train(0), [("compute", "F", 0, 0)]),
            (f(0), [("compute", "B", 0, 0)]),
            (b(0), [("collect", 0)]),
            (collected(0), [("update", 0, False)]),
            (updated(0), [("fill", 0, (7,))]),
            (filled(0), [("send_parts", 7, 0, 3, 0), ("report", 0)]),
            (train(1), [("compute", "F", 1, 0)]),
            (f(0, 1), [("compute", "B", 1, 0)]),
            (b(0, 1), [("collect", 1)]),
            (collected(1), [("update", 1, False)]),
            (updated(1), []),
            (parts(0), [("merge", 7, 0, 0), ("take", 1, (7,))]),
            (taken(1), [("fill", 1, (7,))]),
            (filled(1), [("send_parts", 7, 0, 3, 1), ("report", 1)]),
            (opened(Item(index=2, kind="save", step=2)), []),
            (parts(1), [("merge", 7, 0, 1), ("save", 2)]),
        ],
    )


def test_the_next_step_begins_before_this_one_is_updated():
    """Its forwards and backwards go wherever this step waits: for a gradient, for norms. A snapshot lies in between."""
    keep = opened(Item(index=1, kind="keep", step=1))
    travel(
        middle(delayed=True, clips=True),
        [
            (train(), []),
            (keep, []),
            (opened(Item(index=2, kind="train", step=1, micro_batches=2)), []),
            (activations(0, item=2), []),  # forwards go in the order of the data
            (activations(0), [("compute", "F", 0, 0)]),
            (f(0), [("send", "forward", 2, 0, 0), ("compute", "F", 2, 0)]),
            (gradients(0), []),
            (f(0, item=2), [("send", "forward", 2, 2, 0), ("compute", "B", 0, 0)]),
            (b(0), [("send", "backward", 0, 0, 0), ("collect", 0)]),
            (gradients(0, item=2), []),
            (collected(0), [("send", "norms", 0, 0, -1), ("send", "norms", 2, 0, -1), ("compute", "B", 2, 0)]),
            (once("norms", 0), []),
            (once("norms", 2), []),
            (b(0, item=2), [("send", "backward", 0, 2, 0), ("update", 0, False)]),
            (activations(1, item=2), []),
            (updated(0), [("report", 0), ("keep", 1)]),
            (kept(1), [("report", 1), ("compute", "F", 2, 1)]),
        ],
    )


def test_an_evaluation_is_at_the_newest_weights():
    """So the step after it waits."""
    evaluation = opened(Item(index=1, kind="eval", step=1, micro_batches=1))
    travel(
        middle(delayed=True),
        [
            (train(), []),
            (evaluation, []),
            (opened(Item(index=2, kind="train", step=1, micro_batches=1)), []),
            (activations(0), [("compute", "F", 0, 0)]),
            (activations(0, item=2), []),
            (f(0), [("send", "forward", 2, 0, 0)]),
            (gradients(0), [("compute", "B", 0, 0)]),
            (b(0), [("send", "backward", 0, 0, 0), ("collect", 0)]),
        ],
    )
