"""A simulation decides what a run decides, event by event. Each scenario is played by the simulator and by processes.

Lines are as in `decisions`: the event, by whom, and what it led to.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.simulator import Fault
from tests.tiers import represented_by

from .ports import TIMEOUT_S, Port, Scenario, play

BEGIN = (
    "DeviceJoined d0,d1: BeginEpoch 0 step 0 from the checkpoint; "
    "AssignStage d0; PlaceWeights d0; AssignStage d1; PlaceWeights d1\n"
)
BEGIN_ANY = BEGIN.replace(" step 0", "")
READY = "DeviceReady d0,d1\n"
THE_SPARE_REPLACES_D1 = """\
Observation: RejectDevice d1 False; Disconnect d1; Pause d0
Inventory d0: MakePlan d0,d2 True True
PlanMade: CallDevice d2
DeviceJoined d2: BeginEpoch 1 step 4 from the checkpoint; \
AssignStage d0; PlaceWeights d0; AssignStage d2; PlaceWeights d2
DeviceReady d0,d2
"""
THE_SPARE_GETS_THE_COPY = """\
Observation: RejectDevice d1 False; Disconnect d1; Pause d0
Inventory d0: MakePlan d0,d2 True True
PlanMade: CallDevice d2
DeviceJoined d2: BeginEpoch 1 from memory; GiveState d0; \
AssignStage d0; PlaceWeights d0; AssignStage d2; PlaceWeights d2
DeviceReady d0,d2
"""
THE_SPARE_COMES_IN = """\
DeviceJoined d2: ReceiveState d2; SendState d1
work goes on: Pause d0; Pause d1; Pause d2
Inventory d0,d1,d2: BeginEpoch 1 from memory; AssignStage d0; PlaceWeights d0; AssignStage d2; PlaceWeights d2
"""
THE_END = "work goes on: Halt; FinishRun done"
ALONE = """\
Inventory d{0}: MakePlan d{0} True True
PlanMade: BeginEpoch 1 step 4 from the checkpoint; AssignStage d{0}; PlaceWeights d{0}
DeviceReady d{0}
"""

SCENARIOS: dict[str, tuple[Scenario, str]] = {
    "a device is lost, a spare replaces it": (
        Scenario(spares=1, strikes=Fault(device="d1", time_s=0)),
        BEGIN + READY + THE_SPARE_REPLACES_D1 + THE_END,
    ),
    "a device is lost, its state is a neighbour's copy": (
        Scenario(
            spares=1,
            steps=20,
            at=12,
            save_every=0,
            snapshots=True,
            strikes=Fault(device="d1", time_s=0),
            settles_at_a_step=False,
        ),
        BEGIN_ANY + READY + THE_SPARE_GETS_THE_COPY + THE_END,
    ),
    "a device is lost, the other goes on alone": (
        Scenario(strikes=Fault(device="d1", time_s=0)),
        BEGIN + READY + "Observation: RejectDevice d1 False; Disconnect d1; Pause d0\n" + ALONE.format(0) + THE_END,
    ),
    "the only device is lost": (
        Scenario(devices=1, stages=1, strikes=Fault(device="d0", time_s=0)),
        "DeviceJoined d0: BeginEpoch 0 step 0 from the checkpoint; AssignStage d0; PlaceWeights d0\n"
        "DeviceReady d0\n"
        "Observation: RejectDevice d0 False; Disconnect d0; Halt; FinishRun lost",
    ),
    "a device is silent": (
        Scenario(spares=1, strikes=Fault(kind="silent", device="d1", time_s=0, lasts_s=1000)),
        BEGIN + READY + THE_SPARE_REPLACES_D1 + THE_END,
    ),
    "a link is cut": (
        Scenario(strikes=Fault(kind="link", device="d0", other="d1", time_s=0, lasts_s=2 * TIMEOUT_S)),
        BEGIN + READY + "Observation: RejectDevice d0 False; Disconnect d0; Pause d1\n" + ALONE.format(1) + THE_END,
    ),
    "a device leaves": (
        Scenario(
            spares=1,
            steps=60,
            save_every=0,
            strikes=Fault(kind="leave", device="d1", time_s=0),
            settles_at_a_step=False,
        ),
        BEGIN_ANY
        + READY
        + "Observation: MakePlan d0,d2 True False\n"
        + "PlanMade: CallDevice d2\n"
        + THE_SPARE_COMES_IN
        + "DeviceReady d0,d2: ReleaseDevice d1\n"
        + THE_END,
    ),
    "a device comes": (
        Scenario(devices=1, spares=1, steps=60, save_every=0, settles_at_a_step=False),
        "DeviceJoined d0: BeginEpoch 0 from the checkpoint; AssignStage d0; PlaceWeights d0\n"
        "DeviceReady d0: MakePlan d0,d1 False False\n"
        "PlanMade: CallDevice d1\n"
        "DeviceJoined d1: ReceiveState d1; SendState d0\n"
        "work goes on: Pause d0; Pause d1\n"
        "Inventory d0,d1: BeginEpoch 1 from memory; AssignStage d0; PlaceWeights d0; AssignStage d1; PlaceWeights d1\n"
        "DeviceReady d0,d1\n" + THE_END,
    ),
    "a device becomes slow": (
        Scenario(
            spares=1,
            steps=30,
            save_every=0,
            flops_per_s=4e6,
            strikes=Fault(kind="slow", device="d1", time_s=0, factor=6),
            settles_at_a_step=False,
        ),
        BEGIN_ANY
        + READY
        + "work goes on: MakePlan d0,d1,d2 False False\n"
        + "PlanMade: CallDevice d2\n"
        + THE_SPARE_COMES_IN
        + "DeviceReady d0,d2\n"
        + THE_END,
    ),
    "the coordinator is away": (
        Scenario(strikes=Fault(kind="coordinator", time_s=0, lasts_s=1)),
        BEGIN
        + READY
        + "DeviceJoined d0,d1: Pause d0; Pause d1\n"
        + "Inventory d0,d1: BeginEpoch 2 step 7 from memory; "
        + "AssignStage d0; PlaceWeights d0; AssignStage d1; PlaceWeights d1\n"
        + READY
        + THE_END,
    ),
    "a holder has two stages, the device between them is lost": (
        Scenario(spares=1, labels_stay=True, schedule="zero-bubble", strikes=Fault(device="d1", time_s=0)),
        "DeviceJoined d0,d0/stage 2,d1: BeginEpoch 0 step 0 from the checkpoint; AssignStage d0; PlaceWeights d0; "
        "AssignStage d1; PlaceWeights d1; AssignStage d0/stage 2; PlaceWeights d0/stage 2\n"
        "DeviceReady d0,d0/stage 2,d1\n"
        "Observation: RejectDevice d1 False; Disconnect d1; Pause d0; Pause d0/stage 2\n"
        "Inventory d0,d0/stage 2: MakePlan d0,d0/stage 2,d2 True True\n"
        "PlanMade: CallDevice d2\n"
        "DeviceJoined d2: BeginEpoch 1 step 4 from the checkpoint; AssignStage d0; PlaceWeights d0; AssignStage d2; "
        "PlaceWeights d2; AssignStage d0/stage 2; PlaceWeights d0/stage 2\n"
        "DeviceReady d0,d0/stage 2,d2\n" + THE_END,
    ),
}


SLOW = ("a device is silent", "a link is cut", "a device becomes slow")
CASES: list[tuple[str, Port]] = [(name, port) for name in SCENARIOS for port in ("simulated", "real")]
QUICK = [(name, port) for name, port in CASES if name not in SLOW or port == "simulated"]


@pytest.mark.parametrize(("name", "port"), represented_by(CASES, *QUICK))
def test_the_same_decisions(name: str, port: Port, tmp_path: Path) -> None:
    scenario, expected = SCENARIOS[name]
    assert play(port, scenario, tmp_path) == expected
