"""Clients' states on disk: what is written comes back, and after whatever goes wrong the committed ones are there."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load
from torch import Tensor

from isthmus.errors import UserError
from isthmus.federated import (
    Algorithm,
    ClientTrainer,
    ClientUpdate,
    Combine,
    LocalTrainer,
    StateForm,
    StateStore,
    TrainingTask,
    Values,
)
from isthmus.federated import states as states_module
from isthmus.federated.states import FILE_BYTES, LARGE_BYTES, PAGE_BYTES
from isthmus.protocol.federated_messages import (
    NONE,
    ClientTask,
    PhaseId,
    PhaseSetup,
)
from tests.federated.populations import LOCAL, module, population
from tests.federated.twins import SEED

CLIENTS = 6


def state(*values: float) -> dict[str, Tensor]:
    return {"control": torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 3)}


def store(folder: Path, **more: tuple[int, int]) -> StateStore:
    return StateStore(folder, StateForm({"control": torch.zeros(3)}), **more)


def mixed(numbers: int, count: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {
        "flag": torch.arange(count) % 2 == 0,
        "half": torch.randn(count, 5, generator=draws).to(torch.bfloat16),
        "counts": torch.arange(7 * count).reshape(count, 7, 1),
        "turned": torch.randn(3, count, numbers, generator=draws, dtype=torch.float64).transpose(0, 1),
        "none": torch.zeros(count, 0),
    }


def of(states: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: value[row] for name, value in states.items()}


@pytest.mark.parametrize("numbers", [3, LARGE_BYTES // 8])
def test_what_is_written_comes_back_and_is_the_librarys(numbers: int, tmp_path: Path) -> None:
    given = mixed(numbers, 3)
    kept = StateStore(tmp_path, StateForm(of(given, 0)))
    places = kept.write([5, 1, 9], 4, given)
    for reader in (kept, StateStore(tmp_path, StateForm(of(given, 0)))):
        found = reader.read([5, 1, 9], places)
        assert found.keys() == given.keys()
        assert all(torch.equal(found[name], value) for name, value in given.items())
        reader.expect(places[1:])
        for row, client in ((1, 1), (2, 9), (0, 5), (1, 1)):  # read ahead, read ahead, not, no more
            alone = reader.read([client], [places[row]])
            assert all(torch.equal(alone[name][0], value[row]) for name, value in given.items())
    form = StateForm(of(given, 0))
    at = places[1] * -(-form.size_bytes // PAGE_BYTES) * PAGE_BYTES
    kept.flush()
    whole = load(Path(kept.path(places[1])).read_bytes()[at : at + form.size_bytes])
    assert all(torch.equal(whole[name], value[1]) for name, value in given.items())


def test_many_states_make_few_files_and_no_folder_is_large(tmp_path: Path) -> None:
    small = store(tmp_path)
    assert len({small.path(place) for place in range(0, 1_000_000, 500)}) == 62
    large = StateStore(tmp_path, StateForm({"control": torch.zeros(1, dtype=torch.uint8).expand(FILE_BYTES)}))
    folders = [Path(large.path(place)).parent for place in range(0, 1_000_000, 256)]
    assert len(set(folders)) == len(folders)
    assert len({Path(large.path(place)).parent for place in range(256)}) == 1


def test_executors_share_no_place_and_free_ones_are_written_over(tmp_path: Path) -> None:
    one, two = store(tmp_path, part=(0, 2)), store(tmp_path, part=(1, 2))
    first, second = one.write(range(3), 0, state(1, 2, 3)), two.write(range(3, 6), 0, state(4, 5, 6))
    assert not set(first) & set(second)
    one.flush()
    two.expect(first)
    two.free(first[:2])
    again = two.write([7, 8, 9], 1, state(7, 8, 9))
    assert set(first[:2]) < set(again)
    assert two.read([7, 2, 8, 9], [again[0], first[2], *again[1:]])["control"][:, 0].tolist() == [7, 3, 8, 9]
    two.flush()
    with pytest.raises(UserError, match="does not hold client 0's"):
        one.read([0], first[:1])


def test_a_resumed_run_writes_beside_what_it_needs(tmp_path: Path) -> None:
    before = store(tmp_path)
    places = before.write([0, 1, 2, 3], 0, state(0, 1, 2, 3))
    before.flush()
    taken = np.array([NONE, places[1], NONE, places[3]], dtype=np.int32)
    after = StateStore(tmp_path, StateForm(of(state(0), 0)), taken)
    assert after.write([4, 5, 6], 1, state(4, 5, 6)) == [places[0], places[2], places[3] + 1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 3}, "state 'steps' of client 2: got int, expected a tensor"),
        ({"control": torch.ones(1, 3).to_sparse()}, "'control' of client 2: got torch.sparse_coo, expected strided"),
        ({"control": torch.zeros(1, 4)}, r"got control float32 \[4\], expected control float32 \[3\], as init_client"),
        ({}, r"got nothing, expected control float32 \[3\]"),
    ],
)
def test_a_state_of_another_form_is_refused(given: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^algorithm: .*{said}"):
        store(tmp_path).write([2], 0, given)


def test_numbers_that_no_file_holds_are_refused() -> None:
    with pytest.raises(UserError, match=r"init_client's 'z': got torch.complex64, expected plain numbers"):
        StateForm({"z": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize("numbers", [3, LARGE_BYTES])
def test_a_damaged_state_is_named(numbers: int, tmp_path: Path) -> None:
    kept = StateStore(tmp_path, StateForm({"control": torch.zeros(numbers)}))
    (place,) = kept.write([1], 0, {"control": torch.zeros(1, numbers)})
    kept.flush()
    path = Path(kept.path(place))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=f"{path}: .*(damaged|cannot be read)"):
        kept.read([1], [place])


@pytest.mark.parametrize("numbers", [3, LARGE_BYTES])
def test_a_full_disk_is_told_before_anybody_relies_on_the_state(
    numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = StateStore(tmp_path, StateForm({"control": torch.zeros(numbers)}))
    monkeypatch.setattr(os, "pwrite", full)
    kept.write([1], 0, {"control": torch.zeros(1, numbers)})
    with pytest.raises(UserError, match=f"states under {tmp_path}: cannot be written: No space left"):
        kept.flush()


def test_large_states_are_kept_where_the_file_system_has_nothing_but_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, refused = os.open, list[int]()

    def refuses(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            refused.append(flags)
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", refuses)
    kept = StateStore(tmp_path, StateForm({"control": torch.zeros(LARGE_BYTES)}))
    written = torch.arange(2 * LARGE_BYTES, dtype=torch.float32).view(2, -1)
    places = kept.write([1, 2], 0, {"control": written})
    assert torch.equal(kept.read([2, 1], places[::-1])["control"], written.flip(0))
    assert len(refused) == 1


class Reckoning(Algorithm, frozen=True):
    """Clients keep a number that tells in which rounds they were, in which order."""

    def init_client(self, model: Tensor) -> Values | None:
        return {"rounds": torch.zeros(1, dtype=torch.float64)}

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"delta": "mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        assert state is not None
        return ClientUpdate(
            values={"delta": broadcast["model"]}, state={"rounds": state["rounds"] * 3 + broadcast["round"]}
        )


class Committed(NamedTuple):
    """A run after a round: its clients' states, and what they must be."""

    round: int
    states: NDArray[np.int32]
    values: dict[int, float]


class Crowd:
    """Executors that share a folder of states, and a coordinator that does what it likes with them."""

    def __init__(self, folder: Path, executors: int) -> None:
        self.folder = folder
        self.now = self.durable = Committed(-1, np.full(CLIENTS, NONE, dtype=np.int32), {})
        self.told_durable = -1
        self.attempt = 0
        self.begin(executors)

    def begin(self, executors: int) -> None:
        """All processes are new; what was not on disk is lost."""
        self.now, self.told_durable = self.durable, self.durable.round
        form, algorithm = StateForm({"rounds": torch.zeros(1, dtype=torch.float64)}), Reckoning()
        self.sites = [
            ClientTrainer(
                TrainingTask(algorithm=algorithm, local=LOCAL, seed=SEED),
                module(),
                population(),
                StateStore(self.folder, form, self.now.states, (part, executors)),
            )
            for part in range(executors)
        ]

    def round(self, assignment: Mapping[int, int], kept: set[int]) -> None:
        """Clients train where they are dealt to; of those only `kept` are in. None: the attempt is dropped."""
        self.attempt += 1
        number = self.now.round + 1
        opening = PhaseSetup(
            phase=PhaseId(number, self.attempt), clients=CLIENTS, samples=1000, durable_round=self.told_durable
        )
        states, values, sizes = self.now.states.copy(), dict(self.now.values), population().sizes
        for place, site in enumerate(self.sites):
            tasks = [
                ClientTask(c, int(sizes[c]), int(states[c]))
                for c, at in assignment.items()
                if at % len(self.sites) == place
            ]
            broadcast = {"model": site.resident.vector(), "round": torch.tensor(float(number + 1))}
            site.open(opening, broadcast)
            site.expect(tasks)
            for one in [timed for task in tasks for timed in site.train([task])[0]]:
                if one.client in kept:
                    states[one.client] = one.state
                    values[one.client] = values.get(one.client, 0.0) * 3 + number + 1
            if kept:
                site.hand_over()
            if not {t.client for t in tasks} <= kept:
                site.forget([c for c in kept if kept & assignment.keys()])
        if kept & assignment.keys():
            self.now = Committed(number, states, values)

    def check(self) -> None:
        """What is committed is there, and what a crash would go back to."""
        reader = StateStore(self.folder, StateForm({"rounds": torch.zeros(1, dtype=torch.float64)}))
        for committed in (self.now, self.durable):
            clients = [c for c in range(CLIENTS) if committed.states[c] != NONE]
            if clients:
                found = reader.read(clients, committed.states[clients].tolist())["rounds"][:, 0]
                assert found.tolist() == [committed.values[c] for c in clients]


@pytest.mark.parametrize("in_a_thread", [False, True])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, CLIENTS - 1), st.integers(0, 2), min_size=1),
            st.sets(st.integers(0, CLIENTS - 1)) | st.just(set(range(CLIENTS))),
            st.sampled_from(["nothing", "nothing", "save", "save", "tell", "lose one", "crash"]),
        ),
        min_size=3,
        max_size=12,
    )
)
def test_committed_states_survive_aborts_losses_and_crashes(
    steps: list[tuple[dict[int, int], set[int], str]],
    in_a_thread: bool,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(states_module, "LARGE_BYTES", 1 if in_a_thread else LARGE_BYTES)
    crowd = Crowd(tmp_path_factory.mktemp("states"), executors=3)
    for assignment, kept, then in steps:
        crowd.round(assignment, kept)
        crowd.check()
        match then:
            case "save":  # what executors are told comes behind
                crowd.durable = crowd.now
            case "tell":
                crowd.told_durable = crowd.durable.round
            case "lose one" if len(crowd.sites) > 1:
                crowd.sites.pop()
            case "crash":
                crowd.begin(executors=1 + len(assignment) % 3)
            case _:
                pass


def test_the_disk_holds_little_more_than_a_state_per_client(tmp_path: Path) -> None:
    crowd, everybody = Crowd(tmp_path, executors=1), set(range(CLIENTS))
    for _ in range(10):
        crowd.round(dict.fromkeys(everybody, 0), everybody)
        crowd.durable = crowd.now
        crowd.told_durable = crowd.durable.round
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.states")) == 2 * CLIENTS * PAGE_BYTES
