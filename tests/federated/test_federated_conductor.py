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
from isthmus.federated.partial import Partial, Weights
from isthmus.federated.worksite import Worksite
from isthmus.protocol.federated_events import Finish, Record
from isthmus.runtime.federated.conductor import FederatedConductor, Office, RoundMeasure
from isthmus.runtime.federated.executor import serve
from isthmus.runtime.federated.intake import SumsIntake
from isthmus.runtime.federated.shared_values import Shared
from isthmus.runtime.transport.listener import Listener
from tests.federated.populations import Run

RUN = "r" * 32


class Lying:
    """A partial that says something else than what was folded."""

    def __init__(self, partial: Partial, lie: Callable[[dict[str, Tensor]], dict[str, Tensor]], clients: int) -> None:
        self._partial, self._lie, self._more = partial, lie, clients

    def __getattr__(self, name: str) -> object:
        return getattr(self._partial, name)

    def tensors(self) -> dict[str, Tensor]:
        return self._lie(self._partial.tensors())

    def weights(self) -> Weights:
        told = self._partial.weights()
        return Weights(clients=told.clients + self._more, total=told.total, each=told.each)


def lying(site: Worksite, lie: Callable[[dict[str, Tensor]], dict[str, Tensor]], more: int) -> Worksite:
    class Liar(Worksite):
        @property
        def partial(self) -> Partial:
            return Lying(super().partial, lie, more)  # type: ignore[return-value]

    site.__class__ = Liar
    return site


def conducted(
    run: Run, notes: list[str], shared: Mapping[str, Shared] | None = None, measures: list[RoundMeasure] | None = None
) -> tuple[Finish, list[Record]]:
    """The run with each site in a thread of its own, over loopback, and over shared memory where there is some."""
    records: list[Record] = []
    rooms = {name: one.room for name, one in (shared or {}).items()}
    boards = [one.board for one in (shared or {}).values()]

    def committed(record: Record, measure: RoundMeasure) -> None:
        records.append(record)
        if measures is not None:
            measures.append(measure)

    conductor = FederatedConductor(
        run.machine, run.server, SumsIntake(run.server, {}, rooms),
        Office(run=RUN, patience_s=10.0, last_words_s=0.0, board=boards[0] if boards else None),
        committed=committed, note=notes.append,
    )  # fmt: skip
    listener = Listener("127.0.0.1", patience_s=10.0)
    listener.start(conductor.reception.greet)

    def execute(name: str, site: Worksite) -> None:
        with contextlib.suppress(PeerError):  # dismissed
            serve(f"127.0.0.1:{listener.port}", name, RUN, lambda: site, 10.0, 1, (shared or {}).get(name))

    for name, site in run.sites.items():
        threading.Thread(target=execute, args=(name, site), daemon=True).start()
    try:
        return conductor.conduct(), records
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("lie", "more", "words"),
    [
        (lambda sums: {"delta": sums["delta"][:3]}, 0, "value 'delta': got 3 numbers, expected 53"),
        (lambda sums: {"delta": sums["delta"].double()}, 0, "got torch.float64"),
        (lambda sums: {"other": sums["delta"]}, 0, "sent the values 'other', expected 'delta'"),
        (lambda sums: sums, 5, "sent sums of"),
    ],
)
def test_sums_that_do_not_fit_cost_their_sender_its_place(
    lie: Callable[[dict[str, Tensor]], dict[str, Tensor]], more: int, words: str, tmp_path: Path
) -> None:
    honest = Run("fedavg", {}, tmp_path / "honest", rounds=3)
    assert honest.run().outcome == "done"
    run = Run("fedavg", {}, tmp_path / "run", rounds=3, executors=2)
    lying(run.sites["e1"], lie, more)
    notes: list[str] = []
    finish, records = conducted(run, notes)
    assert finish.outcome == "done", finish
    assert len(notes) == 1, notes
    (note,) = notes
    assert "e1 was lost" in note and words in note
    assert [record.round for record in records] == [0, 1, 2]
    assert all(record.trained.keys() == {"e0"} for record in records)
    assert torch.equal(run.model, honest.model)
