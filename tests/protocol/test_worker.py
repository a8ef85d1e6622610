"""Each test is a journey: what happens to one stage, and what it then asks for."""

import pytest
from msgspec import structs

from isthmus.errors import InternalError
from isthmus.plans.collective import CollectiveMessage, Parts, Round
from isthmus.protocol import Item, StageView, Worker
from isthmus.protocol.events import (
    Collect,
    Collected,
    Compute,
    Computed,
    Fill,
    Filled,
    KeepSnapshot,
    Leave,
    Merge,
    Report,
    Save,
    Saved,
    Send,
    SendParts,
    SnapshotKept,
    Take,
    Taken,
    Update,
    Updated,
    WorkerEvent,
    WorkerInstruction,
)
from isthmus.protocol.exchange import GroupView
from isthmus.protocol.run_messages import Arrived, Halt, OpenItem, PartsArrived

Journey = list[tuple[WorkerEvent, list[WorkerInstruction]]]


def middle(**fields: object) -> StageView:
    """Stage 1 of 3 in a chain, unless `fields` say otherwise."""
    chain = {"forward_from": (0,), "forward_to": (2,), "backward_from": (2,), "backward_to": (0,)}
    return StageView(**{"stage": 1, "stages": 3, "in_flight": 2, **chain, **fields})


def alone(**fields: object) -> StageView:
    """The only stage that computes: nothing to wait for."""
    none = {"forward_from": (), "forward_to": (), "backward_from": (), "backward_to": ()}
    return middle(**{**none, **fields})


def train(index: int = 0, micro_batches: int = 1) -> OpenItem:
    return OpenItem(item=Item(index=index, kind="train", step=index, micro_batches=micro_batches))


def evaluate(index: int = 0, micro_batches: int = 1) -> OpenItem:
    return OpenItem(item=Item(index=index, kind="eval", step=0, micro_batches=micro_batches))


def save() -> OpenItem:
    return OpenItem(item=Item(index=0, kind="save", step=0))


def f(micro_batch: int, item: int = 0) -> Computed:
    return Computed(work="F", item=item, micro_batch=micro_batch)


def b(micro_batch: int, item: int = 0) -> Computed:
    return Computed(work="B", item=item, micro_batch=micro_batch)


def e(micro_batch: int, item: int = 0) -> Computed:
    return Computed(work="E", item=item, micro_batch=micro_batch)


def activations(micro_batch: int, source: int = 0, item: int = 0) -> Arrived:
    return Arrived(parcel="forward", source=source, item=item, micro_batch=micro_batch)


def gradients(micro_batch: int, source: int = 2, item: int = 0) -> Arrived:
    return Arrived(parcel="backward", source=source, item=item, micro_batch=micro_batch)


def once(parcel: str, source: int, item: int = 0) -> Arrived:
    return Arrived(parcel=parcel, source=source, item=item)


def travel(worker: Worker, journey: Journey) -> None:
    for number, (event, expected) in enumerate(journey):
        assert worker.handle(event) == expected, f"event {number}: {event}"


def test_one_micro_batch_on_a_middle_stage():
    travel(
        Worker(middle()),
        [
            (train(), []),
            (activations(0), [Compute("F", 0, 0)]),
            (f(0), [Send("forward", 2, 0, 0)]),
            (gradients(0), [Compute("B", 0, 0)]),
            (b(0), [Send("backward", 0, 0, 0), Collect(0)]),
            (Collected(item=0), [Update(0)]),
            (Updated(item=0), [Report(0)]),
        ],
    )


def test_the_loss_stage_goes_back_at_once():
    last = middle(stage=2, forward_from=(1,), forward_to=(), backward_from=(), backward_to=(1,), has_loss=True)
    travel(
        Worker(last),
        [
            (train(micro_batches=2), []),
            (activations(0, 1), [Compute("F", 0, 0)]),
            (activations(1, 1), []),
            (f(0), [Compute("B", 0, 0)]),
            (b(0), [Send("backward", 1, 0, 0), Compute("F", 0, 1)]),
        ],
    )


def test_backward_goes_before_forward():
    travel(
        Worker(middle()),
        [
            (train(micro_batches=3), []),
            (activations(0), [Compute("F", 0, 0)]),
            (activations(1), []),
            (f(0), [Send("forward", 2, 0, 0), Compute("F", 0, 1)]),
            (activations(2), []),
            (gradients(0), []),
            (f(1), [Send("forward", 2, 0, 1), Compute("B", 0, 0)]),
        ],
    )


def test_of_two_ready_backwards_the_lower_micro_batch_goes_first():
    travel(
        Worker(middle()),
        [
            (train(micro_batches=2), []),
            (activations(0), [Compute("F", 0, 0)]),
            (activations(1), []),
            (f(0), [Send("forward", 2, 0, 0), Compute("F", 0, 1)]),
            (gradients(1), []),
            (gradients(0), []),
            (f(1), [Send("forward", 2, 0, 1), Compute("B", 0, 0)]),
        ],
    )


def test_a_late_gradient_delays_only_its_own_micro_batch():
    travel(
        Worker(middle()),
        [
            (train(micro_batches=2), []),
            (activations(0), [Compute("F", 0, 0)]),
            (activations(1), []),
            (f(0), [Send("forward", 2, 0, 0), Compute("F", 0, 1)]),
            (f(1), [Send("forward", 2, 0, 1)]),
            (gradients(1), [Compute("B", 0, 1)]),
            (gradients(0), []),
            (b(1), [Send("backward", 0, 0, 1), Compute("B", 0, 0)]),
            (b(0), [Send("backward", 0, 0, 0), Collect(0)]),
        ],
    )


def test_forwards_stop_at_the_limit_and_go_on_after_a_backward():
    travel(
        Worker(middle(in_flight=1)),
        [
            (train(micro_batches=2), []),
            (activations(0), [Compute("F", 0, 0)]),
            (activations(1), []),
            (f(0), [Send("forward", 2, 0, 0)]),
            (gradients(0), [Compute("B", 0, 0)]),
            (b(0), [Send("backward", 0, 0, 0), Compute("F", 0, 1)]),
        ],
    )


def test_a_skip_connection_is_waited_for_on_both_ways():
    last_but_one = middle(stage=2, stages=4, forward_from=(0, 1), forward_to=(3,), backward_from=(3,), backward_to=(0,))
    travel(
        Worker(last_but_one),
        [
            (train(), []),
            (activations(0, 1), []),
            (activations(0, 0), [Compute("F", 0, 0)]),
        ],
    )
    first = middle(stage=0, forward_from=(), forward_to=(1, 2), backward_from=(1, 2), backward_to=())
    travel(
        Worker(first),
        [
            (train(), [Compute("F", 0, 0)]),
            (f(0), [Send("forward", 1, 0, 0), Send("forward", 2, 0, 0)]),
            (gradients(0, 2), []),
            (gradients(0, 1), [Compute("B", 0, 0)]),
        ],
    )


def test_a_frozen_stage_has_no_backward_and_no_limit():
    frozen = middle(stage=0, forward_from=(), forward_to=(1,), backward_from=(), backward_to=(), trains=False)
    travel(
        Worker(structs.replace(frozen, in_flight=1)),
        [
            (train(micro_batches=2), [Compute("F", 0, 0)]),
            (f(0), [Send("forward", 1, 0, 0), Compute("F", 0, 1)]),
            (f(1), [Send("forward", 1, 0, 1), Collect(0)]),
        ],
    )


def test_the_owner_of_a_shared_parameter_lends_first_and_collects_last():
    owner = alone(stage=0, parameter_users=(2,))
    travel(
        Worker(owner),
        [
            (train(), [Send("shared", 2, 0), Compute("F", 0, 0)]),
            (f(0), [Compute("B", 0, 0)]),
            (b(0), []),
            (once("shared_gradient", 2), [Collect(0)]),
        ],
    )


def test_a_borrower_waits_for_the_value_and_returns_the_gradient_once():
    joiner = alone(stage=2, parameter_owners=(0,))
    travel(
        Worker(joiner),
        [
            (train(micro_batches=2), []),
            (once("shared", 0), [Compute("F", 0, 0)]),
            (f(0), [Compute("B", 0, 0)]),
            (b(0), [Compute("F", 0, 1)]),
            (f(1), [Compute("B", 0, 1)]),
            (b(1), [Send("shared_gradient", 0, 0), Collect(0)]),
        ],
    )


def test_a_borrowed_value_is_of_one_step_only():
    joiner = Worker(alone(stage=2, parameter_owners=(0,)))
    travel(
        joiner,
        [
            (train(0), []),
            (once("shared", 0), [Compute("F", 0, 0)]),
            (train(1), []),
            (f(0), [Compute("B", 0, 0)]),
            (b(0), [Send("shared_gradient", 0, 0), Collect(0)]),
            (Collected(item=0), [Update(0)]),
            (Updated(item=0), [Report(0)]),
            (once("shared", 0, item=1), [Compute("F", 1, 0)]),
        ],
    )


def test_clipping_waits_for_the_norms_of_all_others():
    travel(
        Worker(alone(clips=True)),
        [
            (train(), [Compute("F", 0, 0)]),
            (f(0), [Compute("B", 0, 0)]),
            (once("norms", 2), []),
            (b(0), [Collect(0)]),
            (Collected(item=0), [Send("norms", 0, 0), Send("norms", 2, 0)]),
            (once("norms", 0), [Update(0)]),
        ],
    )


def test_the_loss_stage_tells_the_count_after_its_last_forward():
    travel(
        Worker(alone(stage=2, counts=True, has_loss=True)),
        [
            (train(micro_batches=2), [Compute("F", 0, 0)]),
            (f(0), [Compute("B", 0, 0)]),
            (b(0), [Compute("F", 0, 1)]),
            (f(1), [Send("count", 0, 0), Send("count", 1, 0), Compute("B", 0, 1)]),
            (b(1), [Collect(0)]),
        ],
    )


def test_the_others_collect_only_when_they_know_the_count():
    travel(
        Worker(alone(counts=True)),
        [
            (train(), [Compute("F", 0, 0)]),
            (f(0), [Compute("B", 0, 0)]),
            (b(0), []),
            (once("count", 2), [Collect(0)]),
        ],
    )


def test_an_evaluation_goes_forward_along_its_own_edges():
    travel(
        Worker(middle(in_flight=1, eval_from=(0,), eval_to=(2,), counts=True, clips=True)),
        [
            (evaluate(micro_batches=2), []),
            (activations(0), [Compute("E", 0, 0)]),
            (activations(1), []),
            (e(0), [Send("forward", 2, 0, 0), Compute("E", 0, 1)]),
            (e(1), [Send("forward", 2, 0, 1), Report(0)]),
        ],
    )


def test_an_evaluation_needs_shared_values_but_returns_no_gradient():
    travel(
        Worker(alone(parameter_owners=(0,), parameter_users=(2,))),
        [
            (evaluate(), [Send("shared", 2, 0)]),
            (once("shared", 0), [Compute("E", 0, 0)]),
            (e(0), [Report(0)]),
        ],
    )


def test_a_checkpoint_holds_the_lane_until_it_is_written():
    travel(
        Worker(alone()),
        [
            (save(), [Save(0)]),
            (train(1), []),
            (Saved(item=0), [Report(0), Compute("F", 1, 0)]),
        ],
    )


def test_leased_items_start_without_asking():
    travel(
        Worker(alone()),
        [
            (evaluate(0), [Compute("E", 0, 0)]),
            (evaluate(1), []),
            (train(2), []),
            (e(0), [Report(0), Compute("E", 1, 0)]),
            (e(0, item=1), [Report(1), Compute("F", 2, 0)]),
        ],
    )


def test_what_arrives_before_its_item_is_leased_is_kept():
    travel(
        Worker(middle()),
        [
            (activations(0), []),
            (train(), [Compute("F", 0, 0)]),
        ],
    )


def test_what_has_arrived_is_forgotten_with_its_item():
    worker = Worker(middle(clips=True, parameter_users=(0,)))
    early = activations(0, item=1)
    for event in (train(), activations(0), early, f(0), gradients(0), once("norms", 0), once("norms", 2), b(0)):
        worker.handle(event)
    for event in (once("shared_gradient", 0), Collected(item=0), Updated(item=0)):
        worker.handle(event)
    assert worker._arrived == {("forward", 1, 0): {0}}  # else a long run would fill the memory


def test_a_stale_epoch_is_dropped_and_counted():
    worker = Worker(alone(), epoch=1)
    opened = train()
    assert worker.handle(opened) == []
    assert worker.statistics().stale == 1
    assert worker.handle(OpenItem(item=opened.item, epoch=1)) == [Compute("F", 0, 0)]
    assert worker.handle(Arrived(parcel="forward", source=0, item=0, micro_batch=0, epoch=0)) == []
    assert worker.statistics().stale == 2
    assert worker.statistics().phase == "tasklets"


@pytest.mark.parametrize("halfway", [[train()], [train(), f(0), b(0)], [save()]], ids=["F", "collect", "save"])
def test_after_a_halt_nothing_more_is_asked_for(halfway: list[WorkerEvent]):
    worker = Worker(alone())
    for event in halfway:
        worker.handle(event)
    assert worker.handle(Halt()) == [Leave()]
    for late in (f(0), b(0), Collected(item=0), Updated(item=0), Saved(item=0), train(1), Halt()):
        assert worker.handle(late) == []


def test_an_event_that_was_not_asked_for_is_an_error():
    worker = Worker(alone())
    worker.handle(train())
    with pytest.raises(InternalError, match="Updated came in phase 'tasklets'"):
        worker.handle(Updated(item=0))


def test_statistics_name_the_item_in_work():
    worker = Worker(alone())
    assert worker.statistics().item == -1
    worker.handle(evaluate(0))
    assert worker.statistics().item == 0
    worker.handle(e(0))
    assert (worker.statistics().item, worker.statistics().phase) == (0, "idle")


def test_a_delayed_sum_goes_on_while_the_next_step_computes() -> None:
    """Summed with worker 3 after every step and used one step later; what is saved is complete."""
    turn = Round(
        sends=(CollectiveMessage(3, Parts(0, 1, 2)),), receives=(CollectiveMessage(3, Parts(1, 2, 2)),), adds=True
    )
    group = GroupView(group=7, rounds=(turn,))
    travel(
        Worker(alone(groups=(group,), averages="deltas", delay=1)),
        [
            (train(0), [Compute("F", 0, 0)]),
            (f(0), [Compute("B", 0, 0)]),
            (b(0), [Collect(0)]),
            (Collected(item=0), [Update(0)]),
            (Updated(item=0), [Fill(0, (7,))]),
            (Filled(item=0), [SendParts(7, 0, 3, 0), Report(0)]),
            (train(1), [Compute("F", 1, 0)]),
            (f(0, 1), [Compute("B", 1, 0)]),
            (b(0, 1), [Collect(1)]),
            (Collected(item=1), [Update(1)]),
            (Updated(item=1), []),
            (PartsArrived(group=7, round=0, source=3, item=0), [Merge(7, 0, 0), Take(1, (7,))]),
            (Taken(item=1), [Fill(1, (7,))]),
            (Filled(item=1), [SendParts(7, 0, 3, 1), Report(1)]),
            (OpenItem(item=Item(index=2, kind="save", step=2)), []),
            (PartsArrived(group=7, round=0, source=3, item=1), [Merge(7, 0, 1), Save(2)]),
        ],
    )


def test_the_next_step_begins_before_this_one_is_updated():
    """Its forwards and backwards go wherever this step waits: for a gradient, for norms. A snapshot lies in between."""
    keep = OpenItem(item=Item(index=1, kind="keep", step=1))
    travel(
        Worker(middle(delayed=True, clips=True)),
        [
            (train(), []),
            (keep, []),
            (OpenItem(item=Item(index=2, kind="train", step=1, micro_batches=2)), []),
            (activations(0, item=2), []),  # forwards go in the order of the data
            (activations(0), [Compute("F", 0, 0)]),
            (f(0), [Send("forward", 2, 0, 0), Compute("F", 2, 0)]),
            (gradients(0), []),
            (f(0, item=2), [Send("forward", 2, 2, 0), Compute("B", 0, 0)]),
            (b(0), [Send("backward", 0, 0, 0), Collect(0)]),
            (gradients(0, item=2), []),
            (Collected(item=0), [Send("norms", 0, 0), Send("norms", 2, 0), Compute("B", 2, 0)]),
            (once("norms", 0), []),
            (once("norms", 2), []),
            (b(0, item=2), [Send("backward", 0, 2, 0), Update(0)]),
            (activations(1, item=2), []),
            (Updated(item=0), [Report(0), KeepSnapshot(1)]),
            (SnapshotKept(item=1), [Report(1), Compute("F", 2, 1)]),
        ],
    )


def test_an_evaluation_is_at_the_newest_weights():
    """So the step after it waits."""
    evaluation = OpenItem(item=Item(index=1, kind="eval", step=1, micro_batches=1))
    travel(
        Worker(middle(delayed=True)),
        [
            (train(), []),
            (evaluation, []),
            (OpenItem(item=Item(index=2, kind="train", step=1, micro_batches=1)), []),
            (activations(0), [Compute("F", 0, 0)]),
            (activations(0, item=2), []),
            (f(0), [Send("forward", 2, 0, 0)]),
            (gradients(0), [Compute("B", 0, 0)]),
            (b(0), [Send("backward", 0, 0, 0), Collect(0)]),
        ],
    )
