import msgspec
import pytest

from isthmus.errors import UserError
from isthmus.plans import Edge, Replica, Schedule, SharedParameter, Stage, StageMemory
from isthmus.protocol.views import stage_views

MEMORY = StageMemory(weights=0, gradients=0, optimizer=0, activations=0)


def stage(device: str, flops_backward: int) -> Stage:
    return Stage(
        device=device,
        first=0,
        last=0,
        first_op="",
        last_op="",
        flops_forward=1,
        flops_backward=flops_backward,
        parameter_bytes=0,
        memory=MEMORY,
    )


def edge(source: int, target: int, *gradients: str) -> Edge:
    return Edge(source=source, target=target, values=("x",), gradients=gradients, forward_bytes=4, backward_bytes=4)


# A frozen stage 0 feeds 1 and 3; 1, 2 and 3 train; 3 uses a parameter of 1 and has the loss.
REPLICA = Replica(
    stages=(stage("a", 0), stage("b", 2), stage("c", 2), stage("d", 2)),
    edges=(edge(0, 1), edge(0, 3), edge(1, 2, "x"), edge(2, 3, "x")),
    shared=(SharedParameter(name="w", owner=1, users=(1, 3), size_bytes=8, gradient_bytes=8),),
    micro_batches=4,
    schedule=Schedule("1f1b", (4, 3, 2, 1)),
)


def changed(**fields: object) -> Replica:
    return msgspec.structs.replace(REPLICA, **fields)


def test_neighbours_follow_the_edges_and_gradients_come_back_where_they_are_due():
    a, b, c, d = stage_views(REPLICA, clips=False, counts=False)
    assert [v.forward_to for v in (a, b, c, d)] == [(1, 3), (2,), (3,), ()]
    assert [v.forward_from for v in (a, b, c, d)] == [(), (0,), (1,), (0, 2)]
    assert [v.backward_to for v in (a, b, c, d)] == [(), (), (1,), (2,)]
    assert [v.backward_from for v in (a, b, c, d)] == [(), (2,), (3,), ()]


def test_each_stage_knows_its_place_limit_and_loss():
    views = stage_views(REPLICA, clips=True, counts=True)
    assert [v.stage for v in views] == [0, 1, 2, 3]
    assert [v.in_flight for v in views] == [4, 3, 2, 1]
    assert [v.has_loss for v in views] == [False, False, False, True]
    assert all(v.clips and v.counts and v.stages == 4 for v in views)
    assert [v.has_loss for v in stage_views(changed(loss_stage=2), clips=False, counts=False)] == [0, 0, 1, 0]


def test_an_owner_does_not_lend_to_itself():
    _, b, _, d = stage_views(REPLICA, clips=False, counts=False)
    assert (b.parameter_users, b.parameter_owners) == ((3,), ())
    assert (d.parameter_users, d.parameter_owners) == ((), (1,))


def test_a_stage_trains_if_it_has_backward_work_gradients_or_shared_parameters():
    def trains(replica: Replica) -> list[bool]:
        return [v.trains for v in stage_views(replica, clips=False, counts=False)]

    assert trains(REPLICA) == [False, True, True, True]
    idle = tuple(stage(s.device, 0) for s in REPLICA.stages)
    assert trains(changed(stages=idle, edges=(edge(0, 1), edge(1, 2, "x")), shared=())) == [False, True, True, False]
    assert trains(changed(stages=idle, edges=(edge(0, 1),))) == [False, True, False, True]


def test_an_evaluation_follows_the_training_edges_unless_told_otherwise():
    same = stage_views(REPLICA, clips=False, counts=False)
    assert all((v.eval_from, v.eval_to) == (v.forward_from, v.forward_to) for v in same)
    other = stage_views(REPLICA, clips=False, counts=False, eval_edges=[(0, 2)])
    assert [(v.eval_from, v.eval_to) for v in other] == [((), (2,)), ((), ()), ((0,), ()), ((), ())]


@pytest.mark.parametrize(
    ("replica", "message"),
    [
        (changed(schedule=Schedule("1f1b", (4, 3))), r"in_flight: got \[4, 3\], expected 4"),
        (changed(schedule=Schedule("1f1b", (4, 3, 0, 1))), "numbers of at least 1"),
        (changed(edges=(edge(2, 1),)), "edge: got stages 2 and 1, expected an earlier and a later one of 0 to 3"),
        (changed(edges=(edge(2, 4),)), "edge: got stages 2 and 4"),
        (changed(loss_stage=4), "loss_stage: got 4, expected -1 to 3"),
        (
            changed(shared=(SharedParameter(name="w", owner=1, users=(7,), size_bytes=8, gradient_bytes=8),)),
            "shared parameter: got stages 1 and 7, expected two of 0 to 3",
        ),
    ],
)
def test_a_replica_that_does_not_fit_together_is_refused(replica: Replica, message: str):
    with pytest.raises(UserError, match=message):
        stage_views(replica, clips=False, counts=False)
