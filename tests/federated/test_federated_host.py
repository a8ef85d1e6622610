"""The conductor with executors in threads: what one of them sends that does not fit costs only its own part."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.client_trainer import ClientTrainer
from isthmus.federated.partial import AggregationWeights, PartialSum
from isthmus.programs.merging import Finish
from isthmus.programs.open_phase import RoundRecord
from isthmus.runtime.federated.executor import serve
from isthmus.runtime.federated.host import ConnectionPolicy, FederatedHost, RoundMeasure
from isthmus.runtime.federated.update_receiver import SharedMemory, SumsReceiver
from isthmus.runtime.transport.listener import Listener
from tests.federated.populations import Run

RUN = "r" * 32


class Lying:
    """A partial that says something else than what was folded."""

    def __init__(
        self, partial: PartialSum, in_shared_memory: Callable[[dict[str, Tensor]], dict[str, Tensor]], clients: int
    ) -> None:
        self._partial, self._in_shared_memory, self._more = partial, in_shared_memory, clients

    def __getattr__(self, name: str) -> object:
        return getattr(self._partial, name)

    def tensors(self) -> dict[str, Tensor]:
        return self._in_shared_memory(self._partial.tensors())

    def weights(self) -> AggregationWeights:
        broadcast = self._partial.weights()
        return AggregationWeights(clients=broadcast.clients + self._more, total=broadcast.total, each=broadcast.each)


def from_shared_memory(
    site: ClientTrainer, in_shared_memory: Callable[[dict[str, Tensor]], dict[str, Tensor]], more: int
) -> ClientTrainer:
    class Liar(ClientTrainer):
        @property
        def partial(self) -> PartialSum:
            return Lying(super().partial, in_shared_memory, more)  # type: ignore[return-value]

    site.__class__ = Liar
    return site


def conducted(
    run: Run,
    notes: list[str],
    shared: Mapping[str, SharedMemory] | None = None,
    measures: list[RoundMeasure] | None = None,
) -> tuple[Finish, list[RoundRecord]]:
    """The run with each site in a thread of its own, over loopback, and over shared memory where there is some."""
    records: list[RoundRecord] = []
    accumulators = {name: one.accumulator for name, one in (shared or {}).items()}
    boards = [one.broadcast_memory for one in (shared or {}).values()]

    def committed(record: RoundRecord, measure: RoundMeasure) -> None:
        records.append(record)
        if measures is not None:
            measures.append(measure)

    host = FederatedHost(
        run.machine,
        run.server,
        SumsReceiver(run.server, accumulators),
        ConnectionPolicy(run=RUN, timeout_s=10.0, broadcast_memory=boards[0] if boards else None),
        committed=committed,
        note=notes.append,
    )
    listener = Listener("127.0.0.1", timeout_s=10.0)
    listener.start(host.acceptor.on_connection)

    def execute(name: str, site: ClientTrainer) -> None:
        with contextlib.suppress(PeerError):  # dismissed
            serve(f"127.0.0.1:{listener.port}", name, RUN, lambda: site, 10.0, 1, (shared or {}).get(name))

    for name, site in run.sites.items():
        threading.Thread(target=execute, args=(name, site), daemon=True).start()
    try:
        return host.coordinate(), records
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("in_shared_memory", "more", "words"),
    [
        (lambda sums: {"delta": sums["delta"][:3]}, 0, "value 'delta': got 3 numbers, expected 53"),
        (lambda sums: {"delta": sums["delta"].double()}, 0, "got torch.float64"),
        (lambda sums: {"other": sums["delta"]}, 0, "sent the values 'other', expected 'delta'"),
        (lambda sums: sums, 5, "sent sums of"),
    ],
)
def test_sums_that_do_not_fit_cost_their_sender_its_place(
    in_shared_memory: Callable[[dict[str, Tensor]], dict[str, Tensor]], more: int, words: str, tmp_path: Path
) -> None:
    honest = Run("fedavg", {}, tmp_path / "honest", rounds=3)
    assert honest.run().outcome == "done"
    run = Run("fedavg", {}, tmp_path / "run", rounds=3, executors=2)
    from_shared_memory(run.sites["e1"], in_shared_memory, more)
    notes: list[str] = []
    finish, records = conducted(run, notes)
    assert finish.outcome == "done", finish
    assert len(notes) == 1, notes
    (note,) = notes
    assert "e1 was lost" in note and words in note
    assert [record.round for record in records] == [0, 1, 2]
    assert all(record.trained.keys() == {"e0"} for record in records)
    assert torch.equal(run.model, honest.model)
