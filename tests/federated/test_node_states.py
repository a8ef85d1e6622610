"""Clients' states on several nodes: where they are read, what moves, and what the schedule makes of that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.errors import UserError
from isthmus.federated.state_files import FILE_BYTES
from isthmus.federated.state_form import StateForm
from isthmus.federated.states import StateLost, StateStore
from isthmus.planners.cohort import CohortProblem, near_states, parrot
from isthmus.protocol.federated_messages import ClientTime
from isthmus.protocol.federated_rules import RoundRules
from isthmus.protocol.federated_scheduler import ClientScheduler
from isthmus.protocol.federated_throughput import ThroughputModel
from isthmus.protocol.state_homes import StateHomes
from isthmus.runtime.federated.node_states import NodeFiles, NodeFolder, NodeView, Rows, state_homes

NUMBERS = 6
FORM = StateForm({"control": torch.zeros(NUMBERS)})
PER_FILE = FILE_BYTES // 4096


def states(*values: float) -> dict[str, torch.Tensor]:
    return {"control": torch.tensor(values)[:, None].expand(-1, NUMBERS).contiguous()}


class Nodes:
    """Two executors with a folder each, or three of which the last shares the first one's."""

    def __init__(self, folder: Path, nodes: tuple[int, ...] = (0, 1), found: dict[int, int] | None = None) -> None:
        self.homes = StateHomes(nodes=nodes, per_file=PER_FILE, move_s=1.0, found=found or {})
        self.folders = [folder / f"node-{node}" for node in nodes]
        self.fetched: list[tuple[int, list[int]]] = []
        self.alive = set(nodes)
        self.files = [self._files(number) for number in range(len(nodes))]
        self.stores = [
            StateStore(place, FORM, self.homes.left_elsewhere(number), (number, len(nodes)), self.files[number])
            for number, place in enumerate(self.folders)
        ]

    def _files(self, number: int) -> NodeFiles:
        def fetch(node: int, places: Sequence[int]) -> Rows | None:
            self.fetched.append((node, list(places)))
            owner = self.homes.nodes.index(node)
            return NodeFolder(self.folders[owner], FORM.size_bytes, "x").read(places) if node in self.alive else None

        def give_back(node: int, places: Sequence[int]) -> None:
            self.files[self.homes.nodes.index(node)].take_back(places)

        node = self.homes.nodes[number]
        return NodeFiles(self.folders[number], FORM, self.homes, node, fetch=fetch, give_back=give_back)


def test_a_state_is_fetched_from_the_node_that_has_it_and_counted(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    first, second = nodes.stores
    places = first.write([3, 4], 0, states(3.0, 4.0)) + second.write([5], 0, states(5.0))
    first.flush()
    second.flush()
    assert first.read([3, 4], places[:2])["control"][:, 0].tolist() == [3.0, 4.0]
    assert not nodes.fetched and not nodes.files[0].moved_bytes
    assert second.read([4, 5, 3], [places[1], places[2], places[0]])["control"][:, 0].tolist() == [4.0, 5.0, 3.0]
    assert nodes.fetched == [(0, [places[1], places[0]])]
    assert nodes.files[1].moved_bytes == 2 * nodes.files[1].each_bytes


def test_a_place_that_is_freed_is_filled_on_its_own_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    first, second = nodes.stores
    (place,) = first.write([3], 0, states(3.0))
    second.free([place])
    assert second.write([3], 1, states(9.0)) == [PER_FILE]  # the first place of its own files
    first.free([])
    assert first.write([4], 1, states(4.0)) == [place]


def test_a_lost_node_takes_its_states_with_it_unless_others_see_its_folder(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    (place,) = nodes.stores[0].write([3], 0, states(3.0))
    nodes.stores[0].flush()
    nodes.alive = {1}
    with pytest.raises(StateLost, match="missing") as lost:
        nodes.stores[1].read([3], [place])
    assert lost.value.clients == {3}
    (tmp_path / "node-1").rmdir() if (tmp_path / "node-1").is_dir() else None
    (tmp_path / "node-1").symlink_to(tmp_path / "node-0")
    assert nodes.stores[1].read([3], [place])["control"][0, 0] == 3.0


def test_files_of_an_earlier_run_stay_where_they_are(tmp_path: Path) -> None:
    """Executor 1 is on another node than before: what it filled is there still, and is not filled here."""
    earlier = Nodes(tmp_path)
    (place,) = earlier.stores[1].write([5], 0, states(5.0))
    earlier.stores[1].flush()
    views = [NodeFolder(f, FORM.size_bytes, n) for f, n in zip(earlier.folders, "ba", strict=True)]
    homes = state_homes(["a", "b"], [NodeView(v.executors(), v.files()) for v in reversed(views)], PER_FILE, 1.0)
    assert homes is not None and homes.nodes == (0, 1)
    assert homes.of(np.array([-1, 0, place], dtype=np.int32)).tolist() == [-1, 0, 0]
    assert homes.found == {1: 0}
    taken = homes.left_elsewhere(1)
    assert set(taken.tolist()) == set(range(PER_FILE, 2 * PER_FILE))
    later = StateStore(tmp_path / "node-0", FORM, taken, (1, 2))
    assert later.write([6], 1, states(6.0)) == [3 * PER_FILE]


def test_executors_that_see_one_folder_are_on_one_node(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    folders = [NodeFolder(tmp_path / place, 100, name) for place, name in zip("xyx", names, strict=True)]
    views = [NodeView(folder.executors(), folder.files()) for folder in folders]
    homes = state_homes(names, views, 10, 1.0)
    assert homes is not None and homes.nodes == (0, 1, 0)
    assert state_homes(names[:1], views[:1], 10, 1.0) is None
    for folder in folders:
        folder.settle()
    assert not [*tmp_path.rglob(".*")]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        NodeFolder(tmp_path / "file" / "states", 100, "a")


def problem(sizes: Sequence[float], executors: int = 2) -> CohortProblem:
    times = np.ones(executors)
    return CohortProblem(sizes=np.array(sizes), seconds_per_sample=times, fixed_s=0.0 * times)


def test_no_state_moves_for_less_than_it_takes() -> None:
    sizes, nodes = [5.0, 5.0, 5.0, 1.0], np.array([0, 1])
    near = np.array([0, 0, 1, 1])
    assert near_states(problem(sizes), near, nodes, 0.1).executor_of.tolist() == near.tolist()
    crowded = np.array([0, 0, 0, 0])
    moved = near_states(problem(sizes), crowded, nodes, 0.1)
    assert (moved.executor_of != 0).sum() == 2 and moved.makespan_s == pytest.approx(10.0)
    stays = near_states(problem(sizes), crowded, nodes, 20.0)
    assert stays.executor_of.tolist() == crowded.tolist() and stays.makespan_s == 16.0


def test_without_states_it_is_parrots_schedule() -> None:
    whole = problem([float(n % 7 + 1) for n in range(20)], 3)
    found = near_states(whole, np.full(20, -1), np.array([0, 1, 1]), 5.0)
    assert found.executor_of.tolist() == parrot(whole).executor_of.tolist()


def test_states_of_a_node_without_executors_move_in_any_case() -> None:
    found = near_states(problem([3.0, 3.0]), np.array([7, 1]), np.array([0, 1]), 1.0)
    assert found.executor_of.tolist() == [0, 1] and found.makespan_s == 4.0


def test_rounds_leave_states_where_they_are_and_theft_counts_the_move() -> None:
    """The last round's times differ by less than a move is worth."""
    sizes, names = np.full(6, 10), ["a", "b"]
    rules = RoundRules(rounds=5, needed=6, planner="certified")
    states = np.array([0, PER_FILE, 1, PER_FILE + 1, 2, -1], dtype=np.int32)
    throughput = ThroughputModel(2, window_rounds=5)
    scheduler = ClientScheduler(names, rules, sizes, throughput, states, {})
    scheduler.place_states(StateHomes(nodes=(0, 1), per_file=PER_FILE, move_s=5.0))
    throughput.record(0, 0, [ClientTime(c, 10, 1.0) for c in range(3)])
    throughput.record(0, 1, [ClientTime(c, 10, 1.02) for c in range(3)])
    cohort = np.arange(6)
    for round_ in range(3):
        tasks = scheduler.assignment(round_, cohort, names).tasks
        assert {t.client for t in tasks["a"]} == {0, 2, 4}
    assert scheduler.line_of_thief("a", "b").seconds(10) == pytest.approx(scheduler.line("a").seconds(10) + 5.0)
    assert scheduler.line_of_thief("a", "a") == scheduler.line("a")
    assert [scheduler.move_s(client, "a") for client in (0, 1)] == [0.0, 5.0]
