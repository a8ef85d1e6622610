"""Values in memory that processes share: the same bits as by messages, and nothing is written over too early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.copies import asked
from isthmus.errors import InternalError, PeerError, UserError
from isthmus.federated import ClientUpdate
from isthmus.federated.admission import Form
from isthmus.federated.partial import PartialSum
from isthmus.federated.stacked import likely_shapes, rows_for
from isthmus.runtime.federated.host import RoundMeasure
from isthmus.runtime.federated.update_receiver import SharedAccumulator, SharedBroadcast, SharedMemory
from isthmus.runtime.processes.memory import ANY_SIZE, keep_freed_pages
from tests.federated.populations import Run
from tests.federated.test_federated_host import conducted

TOLD = {
    "model": torch.linspace(-1, 1, 1001, dtype=torch.float64),
    "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "round": torch.tensor(3),
    "none": torch.empty(0),
}


@pytest.mark.forks
def test_a_copy_that_fails_says_why() -> None:
    def fails() -> int:
        raise ValueError("no such shape")

    with pytest.raises(InternalError, match="a copy of this process failed: ValueError: no such shape"):
        asked(fails, int)

    def refuses() -> int:
        raise UserError("model: does not take the data")

    with pytest.raises(UserError, match="model: does not take the data"):
        asked(refuses, int)


@pytest.mark.forks
def test_a_copy_of_this_process_reads_what_is_put_later() -> None:
    broadcast_memory = SharedBroadcast(TOLD)
    headers = broadcast_memory.put({name: torch.zeros_like(value) for name, value in TOLD.items()})
    assert headers is not None

    def same() -> int:
        again = broadcast_memory.put(TOLD)
        assert again is not None
        return 1

    assert asked(same, int) == 1  # the copy wrote, this process reads
    found = broadcast_memory.get(headers)
    assert list(found) == list(TOLD)
    for name, value in TOLD.items():
        assert torch.equal(found[name], value)
        assert found[name].stride() == value.stride()
        assert found[name].dtype == value.dtype


def test_what_does_not_fit_is_not_put() -> None:
    broadcast_memory = SharedBroadcast({"model": torch.zeros(16)})
    headers = broadcast_memory.put({"model": torch.ones(16)})
    assert headers is not None
    assert broadcast_memory.put({"model": torch.zeros(17)}) is None
    assert torch.equal(broadcast_memory.get(headers)["model"], torch.ones(16))


def test_sums_in_a_room_have_the_bits_of_sums_elsewhere() -> None:
    forms = [{"a": Form((40_000,), torch.float32), "n": Form((1,), torch.float32)}, {"b": Form((3,), torch.float32)}]
    accumulator = SharedAccumulator(forms)
    assert [{name: len(total) for name, total in one.items()} for one in accumulator.totals] == [
        {"a": 40_000, "n": 1},
        {"b": 3},
    ]
    there = PartialSum({"a": "weighted_mean", "n": "sum"}, accumulators=accumulator.totals[0])
    elsewhere = PartialSum({"a": "weighted_mean", "n": "sum"})
    for number in range(2):  # the second time over the first one's sums
        for partial in (there, elsewhere):
            partial.begin(30, 3)
            for client in range(3):
                term = torch.linspace(-client, number + 1, 40_000)
                partial.fold(client, ClientUpdate(values={"a": term, "n": torch.ones(1)}), 10)
        for name, total in elsewhere.tensors().items():
            assert torch.equal(accumulator.totals[0][name], total)


@pytest.mark.forks
def test_lent_sums_are_waited_for() -> None:
    accumulator = SharedAccumulator([{"a": Form((3,), torch.float32)}])
    accumulator.wait(0.0)
    accumulator.publish()
    with pytest.raises(PeerError, match="has not read the last sums"):
        accumulator.wait(0.01)

    def read() -> int:
        accumulator.release()
        return 1

    assert asked(read, int) == 1
    accumulator.wait(0.0)


@pytest.mark.parametrize("algorithm", ["fedavg", "mime"])
def test_a_run_through_shared_memory_has_the_bits_of_one_by_messages(algorithm: str, tmp_path: Path) -> None:
    def made(place: str) -> Run:  # by its times an executor may get no client on a busy machine
        return Run(algorithm, {}, tmp_path / place, rounds=3, executors=2, planner="uniform", steals=False)

    sent = made("sent")
    counted: list[RoundMeasure] = []
    assert conducted(sent, [], measures=counted)[0].outcome == "done"
    run = made("shared")
    broadcast_memory = SharedBroadcast(run.server.broadcast())
    shared = {name: SharedMemory(broadcast_memory, SharedAccumulator(run.server.sums)) for name in run.sites}
    measures: list[RoundMeasure] = []
    finish, records = conducted(run, notes := [], shared, measures)
    assert (finish.outcome, notes, len(records)) == ("done", [], 3)
    assert torch.equal(run.model, sent.model)
    for here, there in zip(measures, counted, strict=True):  # counted as if it had been sent
        assert (here.trips, here.value_bytes) == (there.trips, there.value_bytes)
        assert here.received_bytes > here.value_bytes > 0
        assert here.sent_bytes > here.trips * run.model.nbytes


@given(count=st.integers(1, 5000))
def test_few_rows_are_for_nothing(count: int) -> None:
    rows = rows_for(count)
    assert rows >= count
    assert rows_for(rows) == rows
    assert rows <= max(count + 3, 1.25 * count)


def test_shapes_that_will_come_are_known() -> None:
    even = np.full(500, 45)
    assert likely_shapes(even, 10, 128, 20) == [(10, 5), (10, 20)]
    assert likely_shapes(even, 10, 4, 20) == [(4, 5), (4, 20)]
    mixed = np.array([2] * 800 + [1] * 200)
    assert likely_shapes(mixed, 100, 128, 20) == [(80, 2), (96, 2), (16, 1), (20, 1), (24, 1)]
    assert likely_shapes(np.arange(1, 1000), 10, 128, 20) == []  # hardly two are alike


def test_pages_can_be_kept_more_than_once() -> None:
    keep_freed_pages(ANY_SIZE, arenas=1)
    keep_freed_pages(ANY_SIZE, arenas=1)
    assert torch.ones(1 << 20).sum() == 1 << 20
