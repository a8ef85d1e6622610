"""What an executor or a site never sends is refused. What it sends is what the machine takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.errors import PeerError
from isthmus.federated.admission import AdmissionRules
from isthmus.federated.algorithms import AlgorithmSpec
from isthmus.federated.partial import AggregationWeights
from isthmus.federated.robust import Aggregation
from isthmus.federated.task_spec import TaskSpec
from isthmus.models import ModelSpec
from isthmus.protocol.federated_messages import (
    ClientTask,
    ClientTime,
    ExecutorDrained,
    ExecutorJoined,
    ExecutorReport,
    PhaseClosed,
    PhaseId,
    RefusedUpdate,
    SumsSent,
    TasksReturned,
)
from isthmus.protocol.run_messages import DeviceFailed, DeviceReady, Halt
from isthmus.runtime.federated.update_receiver import SiteUpdateReceiver, SumsReceiver
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import FromExecutor, SiteValues, SummedValues, ToExecutor
from isthmus.runtime.messages.message import Message
from isthmus.runtime.messages.run import Heartbeat, ToCoordinator
from isthmus.training.layout import TensorHeader
from tests.federated.populations import LOCAL, Run

PHASE = PhaseId(0)
HEADER = TensorHeader(name="delta", dtype="float32", shape=(1,), stride=(1,))
SUMMED = SummedValues(weights=AggregationWeights(clients=0, total=0))
SUMS = SumsSent(phase=PHASE, timed=())
OWN = ClientTime(4, 10, 0.5)


def summing(folder: Path) -> SumsReceiver:
    return SumsReceiver(Run("fedavg", {}, folder).server)


def of_sites(folder: Path, note: Callable[[str], None] = lambda _: None) -> SiteUpdateReceiver:
    def task_spec(client: int) -> TaskSpec:
        spec = AlgorithmSpec()
        model, aggregation = ModelSpec(name="mlp"), Aggregation(most_samples=10)
        return TaskSpec(
            job="j",
            run="0" * 32,
            algorithm=spec,
            model=model,
            local=LOCAL,
            seed=0,
            client=client,
            aggregation=aggregation,
        )

    return SiteUpdateReceiver(
        Run("fedavg", {}, folder).server,
        {"oslo": 4},
        task_spec,
        AdmissionRules(),
        "r",
        note,
        rounds_late=lambda site, phase: None,
    )


@pytest.mark.parametrize("kind", [summing, of_sites])
@pytest.mark.parametrize(
    ("message", "words"),
    [
        (ToCoordinator(run="r", body=DeviceReady()), "sent ToCoordinator to the coordinator"),
        (ToExecutor(run="r", body=PhaseClosed(phase=PHASE)), "sent ToExecutor to the coordinator"),
        (FromExecutor(run="r", body=SUMS), "sent SumsSent with no values"),
        (FromExecutor(run="r", body=ExecutorDrained(phase=PHASE), values=SUMMED), "Drained with SummedValues"),
        (FromExecutor(run="r", body=DeviceFailed(reason="", fault="user"), values=SiteValues()), "with SiteValues"),
        (FromExecutor(run="r", body=ExecutorJoined(), tensors=(HEADER,)), "sent ExecutorJoined with tensors"),
        (Heartbeat(run="r", tensors=(HEADER,)), "sent Heartbeat with tensors"),
    ],
)
def test_a_frame_that_no_executor_sends_is_refused_before_its_tensors(
    kind: Callable[[Path], SumsReceiver | SiteUpdateReceiver], message: AnyMessage, words: str, tmp_path: Path
) -> None:
    with pytest.raises(PeerError, match=words):
        kind(tmp_path).guard("oslo", message)


def test_values_are_of_the_receivers_kind(tmp_path: Path) -> None:
    of_site = FromExecutor(run="r", body=SUMS, values=SiteValues(), tensors=(HEADER,))
    of_sums = FromExecutor(run="r", body=SUMS, values=SUMMED, tensors=(HEADER,))
    with pytest.raises(PeerError, match="sent SumsSent with SiteValues"):
        summing(tmp_path / "a").guard("oslo", of_site)
    with pytest.raises(PeerError, match="sent SumsSent with SummedValues"):
        of_sites(tmp_path / "b").guard("oslo", of_sums)
    summing(tmp_path / "c").guard("oslo", of_sums)
    of_sites(tmp_path / "d").guard("oslo", of_site)


def test_a_process_has_no_samples_of_its_own(tmp_path: Path) -> None:
    receiver = summing(tmp_path)
    assert receiver.on_report("oslo", ExecutorJoined(), None, {}) == ExecutorJoined()
    with pytest.raises(PeerError, match="joined with 3 samples"):
        receiver.on_report("oslo", ExecutorJoined(samples=3), None, {})


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (ExecutorJoined(), "joined without its number of samples"),
        (ExecutorJoined(samples=10), "joined again, with 10 samples"),
        (TasksReturned(phase=PHASE, tasks=(ClientTask(4, 10),)), "gave back clients"),
        (SumsSent(phase=PHASE, timed=(ClientTime(4, 10, 0.5, state=7),)), "with state 7, expected -1"),
        (SUMS, "not of client 4 with 10 samples"),
        (SumsSent(phase=PHASE, timed=(ClientTime(5, 10, 0.5),)), "not of client 4"),
        (SumsSent(phase=PHASE, timed=(ClientTime(4, 11, 0.5),)), "not of client 4 with 10 samples"),
        (SumsSent(phase=PHASE, timed=(OWN, OWN)), "not of client 4"),
        (SumsSent(phase=PHASE, timed=(OWN,), refused=(RefusedUpdate(4, "bad"),)), "not of client 4"),
    ],
)
def test_a_site_reports_on_its_own_client_only(report: ExecutorReport, words: str, tmp_path: Path) -> None:
    notes: list[str] = []
    receiver = of_sites(tmp_path, notes.append)
    with pytest.raises(PeerError, match="sent ExecutorDrained before it had joined"):
        receiver.on_report("oslo", ExecutorDrained(phase=PHASE), None, {})
    joined = ExecutorJoined(samples=10)
    with pytest.raises(PeerError, match=r"joined with 11 samples, expected 10: federated\.aggregation\.most_samples"):
        receiver.on_report("oslo", ExecutorJoined(samples=11), None, {})
    assert receiver.on_report("oslo", joined, None, {}) is joined
    assert notes == ["site oslo takes part with at most 10 samples"], "its own number stays with it"
    update = SumsSent(phase=PHASE, timed=(OWN,))
    assert receiver.on_report("oslo", update, SiteValues(), {"delta": torch.zeros(1)}) is update
    with pytest.raises(PeerError, match=words):
        receiver.on_report("oslo", report, SiteValues() if isinstance(report, SumsSent) else None, {})


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ToExecutor, ExecutorDrained(phase=PHASE)),
        (FromExecutor, PhaseClosed(phase=PHASE)),
        (FromExecutor, Halt()),
        (FromExecutor, ExecutorJoined(samples=0)),
        (FromExecutor, ExecutorJoined(samples=1 << 40)),
    ],
)
def test_a_body_of_the_other_direction_or_out_of_bounds_does_not_decode(
    kind: type[Message], body: msgspec.Struct
) -> None:
    frame = {"type": kind.__name__, "run": "r", "body": msgspec.to_builtins(body)}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(frame, AnyMessage)


def test_a_frame_comes_back_as_it_was() -> None:
    sums = SumsSent(phase=PhaseId(3, 1, 1), timed=(OWN,), refused=(RefusedUpdate(5, "bad", diverged=True),))
    shared = SummedValues(weights=AggregationWeights(clients=1, total=10), shared_bounds={"delta": 0.5})
    for values in (shared, SiteValues(weight=2.0)):
        frame = FromExecutor(run="r", body=sums, values=values, tensors=(HEADER,))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=AnyMessage) == frame
