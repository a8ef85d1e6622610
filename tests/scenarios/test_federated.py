"""Federated rounds decide the same in a simulation and in a run, event by event."""

from __future__ import annotations

import pytest

from isthmus.protocol.federated_planning import RoundRules

from .federated_ports import Departure, Port, Scenario, Slow, play

DEADLINE_S = 3.0
"""A busy machine may keep an executor that is not slow for so long."""
NEVER = Slow("Finish", 1000.0)

SCENARIOS: dict[str, tuple[Scenario, str]] = {
    "a round ends at its deadline": (
        Scenario(
            rules=RoundRules(rounds=2, deadline_s=DEADLINE_S, steals=False),
            slow={("c", 0): NEVER},
        ),
        "ExecutorJoined a,b,c: PlanRound 0\n"
        "RoundPlanned: PhaseOpened 0.0 a 5,6,8; PhaseOpened 0.0 b 1,2,3; PhaseOpened 0.0 c 0,4,7\n"
        "PhaseUnderWay: PlanRound 1\n"
        "SumsSent a,b: MergeSums a; MergeSums b\n"
        "Tick: PhaseDropped c; UpdateServer; CommitRound 0 by deadline of 1,2,3,5,6,8 without 0,4,7; "
        "PhaseOpened 1.0 a 5,6,8; PhaseOpened 1.0 b 1,2,3; PhaseOpened 1.0 c 0,4,7\n"
        "SumsSent a,b: MergeSums a; MergeSums b; PhaseDropped c; UpdateServer; "
        "CommitRound 1 by behind of 1,2,3,5,6,8 without 0,4,7; Halt; Finish done",
    ),
    "a round ends with its quorum": (
        Scenario(sites=True, rules=RoundRules(rounds=1, quorum=0.6), slow={("c", 0): NEVER}),
        "ExecutorJoined a,b,c: PhaseOpened 0.0 a 0; PhaseOpened 0.0 b 1; PhaseOpened 0.0 c 2\n"
        "SumsSent a,b: MergeSums a; MergeSums b; PhaseDropped c; UpdateServer; "
        "CommitRound 0 by quorum of 0,1 without 2; Halt; Finish done",
    ),
    "too few at the deadline, twice": (
        Scenario(
            sites=True,
            rules=RoundRules(rounds=2, deadline_s=DEADLINE_S / 2, minimum=3, attempts=2),
            slow={("c", 0): NEVER},
        ),
        "ExecutorJoined a,b,c: PhaseOpened 0.0 a 0; PhaseOpened 0.0 b 1; PhaseOpened 0.0 c 2\n"
        "SumsSent a,b: MergeSums a; MergeSums b\n"
        "Tick: PhaseDropped a; PhaseDropped b; PhaseDropped c; PhaseOpened 0.1 a 0; PhaseOpened 0.1 b 1; "
        "PhaseOpened 0.1 c 2\n"
        "SumsSent a,b: MergeSums a; MergeSums b\n"
        "Tick: PhaseDropped a; PhaseDropped b; PhaseDropped c; Halt; Finish lost",
    ),
    "a late update counts in the next round": (
        Scenario(
            sites=True,
            rules=RoundRules(rounds=2, quorum=0.6, staleness=1),
            slow={
                ("c", 0): Slow("PhaseOpened 1", 0.3),
                ("a", 1): Slow("MergeSums c", 1.0),
                ("b", 1): NEVER,
            },
        ),
        "ExecutorJoined a,b,c: PhaseOpened 0.0 a 0; PhaseOpened 0.0 b 1; PhaseOpened 0.0 c 2\n"
        "SumsSent a,b,c: MergeSums a; MergeSums b; UpdateServer; CommitRound 0 by quorum of 0,1 without 2; "
        "PhaseOpened 1.0 a 0; PhaseOpened 1.0 b 1; MergeSums a; MergeSums c; UpdateServer; "
        "CommitRound 1 by quorum of 0,2 without 1 2 is 1 late; Halt; Finish done",
    ),
    "clients are stolen": (
        Scenario(executors="ab", rules=RoundRules(rounds=1), slow={("b", 0): Slow("SumsSent a", 5.0)}),
        "ExecutorJoined a,b: PlanRound 0\n"
        "RoundPlanned: PhaseOpened 0.0 a 0,1,4,5,8; PhaseOpened 0.0 b 2,3,6,7\n"
        "ExecutorDrained a: TasksRecalled b\n"
        "TasksReturned 3,6 b: TasksGranted a 3,6\n"
        "ExecutorDrained a: TasksRecalled b\n"
        "TasksReturned 7 b: TasksGranted a 7\n"
        "ExecutorDrained a: PhaseClosed a\n"
        "SumsSent a: MergeSums a\n"
        "ExecutorDrained b: PhaseClosed b\n"
        "SumsSent b: MergeSums b; UpdateServer; CommitRound 0 by all of 0,1,2,3,4,5,6,7,8 3 stolen; "
        "Halt; Finish done",
    ),
    "an executor is lost": (
        Scenario(
            executors="ab",
            rules=RoundRules(rounds=2, steals=False),
            slow={("b", 0): NEVER, ("a", 0): Slow("ExecutorLost b", 2.0)},
            departs=Departure("b", "PlanRound 1", 1.0),
        ),
        "ExecutorJoined a,b: PlanRound 0\n"
        "RoundPlanned: PhaseOpened 0.0 a 0,1,4,5,8; PhaseOpened 0.0 b 2,3,6,7\n"
        "PhaseUnderWay: PlanRound 1\n"
        "ExecutorLost b: TasksGranted a 2,3,6,7\n"
        "SumsSent a: MergeSums a; UpdateServer; CommitRound 0 by all of 0,1,2,3,4,5,6,7,8; "
        "PlanRound 1\n"
        "RoundPlanned: PhaseOpened 1.0 a 0,1,2,3,4,5,6,7,8\n"
        "SumsSent a: MergeSums a; UpdateServer; "
        "CommitRound 1 by all of 0,1,2,3,4,5,6,7,8; Halt; Finish done",
    ),
    "a site leaves and is back": (
        Scenario(
            sites=True,
            rules=RoundRules(rounds=3),
            slow={
                ("b", 0): NEVER,
                ("a", 0): Slow("ExecutorLost b", 2.0),
                ("c", 0): Slow("ExecutorLost b", 2.0),
                ("a", 1): Slow("ExecutorJoined b x2", 5.0),
                ("c", 1): Slow("ExecutorJoined b x2", 5.0),
            },
            departs=Departure("b", "PhaseOpened 0.0 b", 1.0, "CommitRound 0", 4.0),
        ),
        "ExecutorJoined a,b,c: PhaseOpened 0.0 a 0; PhaseOpened 0.0 b 1; PhaseOpened 0.0 c 2\n"
        "ExecutorLost b\n"
        "SumsSent a,c: MergeSums a; MergeSums c; UpdateServer; CommitRound 0 by all of 0,2 without 1; "
        "PhaseOpened 1.0 a 0; PhaseOpened 1.0 c 2\n"
        "ExecutorJoined b\n"
        "SumsSent a,b,c: MergeSums a; MergeSums c; UpdateServer; CommitRound 1 by all of 0,2; "
        "PhaseOpened 2.0 a 0; PhaseOpened 2.0 b 1; PhaseOpened 2.0 c 2; MergeSums a; MergeSums b; MergeSums c; "
        "UpdateServer; CommitRound 2 by all of 0,1,2; Halt; Finish done",
    ),
}


@pytest.mark.parametrize("port", ["simulated", "real"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_decisions(name: str, port: Port) -> None:
    scenario, expected = SCENARIOS[name]
    assert play(port, scenario) == expected
