"""Numbers that are not finite, as the machines see them."""

from __future__ import annotations

import pytest
from tests.programs.ports import Asked, Recorder
from tests.protocol.recorded import Recorded, halted

from isthmus.protocol import Item, RunSpec, StageView, Worker
from isthmus.protocol.finite import Divergence, NonFinite, earliest
from isthmus.protocol.run_messages import Arrived, DeviceReady, ItemReported
from isthmus.protocol.run_ports import FinishRun
from isthmus.protocol.worker import StagePort

OUTPUT = NonFinite(where="output", stage=1, micro_batch=3, name="'x'", decides=True)


def test_a_value_on_its_way_alone_decides_nothing():
    on_its_way = {
        "oslo": NonFinite(where="output", stage=0, micro_batch=0),
        "lima": NonFinite(where="gradient", stage=1),
    }
    assert earliest(on_its_way) is None
    assert Divergence(1).stepped(3, on_its_way) == ("", False)
    loss = NonFinite(where="loss", stage=2, micro_batch=1, decides=True)
    assert earliest({**on_its_way, "rome": loss}) == ("oslo", on_its_way["oslo"])


def test_the_earliest_place_is_named():
    said = {
        "oslo": NonFinite(where="gradient", stage=1, micro_batch=0),
        "lima": NonFinite(where="output", stage=1, micro_batch=0),
        "rome": NonFinite(where="output", stage=2, micro_batch=0),
        "cork": NonFinite(where="loss", stage=3, micro_batch=0),
        "baku": NonFinite(where="output", stage=0, micro_batch=1),
        "bern": NonFinite(where="parameter gradient", stage=3, decides=True),
    }
    order = []
    while (first := earliest(said)) is not None:
        order.append(first[0])
        del said[first[0]]
    assert order == ["lima", "rome", "cork", "oslo", "baku", "bern"]


def test_backward_the_last_stage_is_the_first():
    said = {n: NonFinite(where="gradient", stage=k, micro_batch=0, decides=True) for n, k in (("a", 1), ("b", 2))}
    assert earliest(said) == ("b", said["b"])


def test_only_steps_in_a_row_end_a_run():
    divergence = Divergence(2)
    seen = [divergence.stepped(step, {"oslo": OUTPUT} if bad else {})[1] for step, bad in enumerate((1, 0, 1, 1))]
    assert seen == [False, False, False, True]


def test_a_run_that_ignores_them_never_ends_for_them():
    divergence = Divergence(0)
    assert not any(divergence.stepped(step, {"oslo": OUTPUT})[1] for step in range(50))
    assert divergence.saved(3, {"oslo": NonFinite(where="parameter", stage=0, name="'w'", decides=True)})[1] is False


def running(**fields: int) -> Recorded:
    spec = RunSpec(**{"steps": 4, "micro_batches": 2, "micro_batch_size": 1, "lease_ahead": 2, **fields})
    coordinator = Recorded(("oslo", "tokyo"), spec)
    for device in coordinator.devices:
        coordinator.joined(device)
    for device in coordinator.devices:
        coordinator.takes(device, DeviceReady())
    return coordinator


def report(machine: Recorded, item: int, non_finite: NonFinite | None = None) -> list[Asked]:
    machine.takes("oslo", ItemReported(item=item, non_finite=non_finite))
    return machine.tell(machine.takes, "tokyo", ItemReported(item=item, loss=1.0, count=1.0))


def test_a_step_that_is_not_finite_ends_the_run_and_says_where():
    machine = running(non_finite_steps=1, save_every=1)
    report(machine, 0)
    assert any(name == "commit_checkpoint" for name, *_ in report(machine, 1))
    advance, halt, (_, finish) = report(machine, 2, OUTPUT)
    assert advance[0] == "item_done"
    assert halt == halted()
    assert isinstance(finish, FinishRun)
    assert finish.outcome == "diverged"
    for words in ("step 2", "stage 1", "'oslo'", "micro-batch 3", "checkpoint is of step 1"):
        assert words in finish.reason


def test_a_checkpoint_of_weights_that_are_not_finite_is_not_committed():
    machine = running(non_finite_steps=1, save_every=1)
    report(machine, 0)
    found = report(machine, 1, NonFinite(where="parameter", stage=0, name="'w'", decides=True))
    assert not any(name == "commit_checkpoint" for name, *_ in found)
    _, finish = found[-1]
    assert isinstance(finish, FinishRun)
    assert finish.outcome == "diverged"


def test_a_run_that_ignores_them_marks_such_a_checkpoint():
    machine = running(save_every=1)
    report(machine, 0)
    found = report(machine, 1, NonFinite(where="parameter", stage=0, name="'w'", decides=True))
    assert ("commit_checkpoint", Item(index=1, kind="save", step=1), False) in found


@pytest.mark.parametrize("own, theirs", [(True, False), (False, True), (False, False), (True, True)])
@pytest.mark.parametrize("skips", [True, False])
def test_all_stages_leave_out_the_same_updates(own: bool, theirs: bool, skips: bool):
    view = StageView(
        stage=0,
        stages=2,
        in_flight=1,
        forward_from=(),
        forward_to=(),
        backward_from=(),
        backward_to=(),
        clips=True,
        skips=skips,
    )
    port = Recorder(StagePort)
    worker = Worker(view, port.port)
    worker.opened(Item(index=0, kind="train", step=0), 0)
    worker.collected(0, finite=own)
    assert port.took() == [("collect", 0), ("send", "norms", 1, 0, -1)]
    worker.arrived(Arrived(parcel="norms", source=1, item=0, finite=theirs))
    assert port.took() == [("update", 0, skips and not (own and theirs))]
    worker.updated(0)
    worker.opened(Item(index=1, kind="train", step=1), 0)
    worker.collected(1)
    worker.arrived(Arrived(parcel="norms", source=1, item=1))
    assert port.took() == [("report", 0), ("collect", 1), ("send", "norms", 1, 1, -1), ("update", 1, False)]
