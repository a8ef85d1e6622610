"""What a disk did to clients' states and committed rounds is noticed before it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.federated import (
    Algorithm,
    ClientTrainer,
    ClientUpdate,
    Combine,
    Commits,
    LocalTrainer,
    RunIdentity,
    StateForm,
    StateStore,
    TrainingTask,
    Values,
)
from isthmus.federated.admission import AdmissionRules, bounded
from isthmus.federated.algorithms.scaffold import Scaffold
from isthmus.federated.resident import Resident
from isthmus.federated.site import Site, SiteStates, UpdateRules
from isthmus.federated.states import LARGE_BYTES, StateLost
from isthmus.protocol.federated_messages import (
    NONE,
    ClientTask,
    ClientTime,
    PhaseId,
    PhaseSetup,
)
from tests.federated.populations import LOCAL, module, population
from tests.federated.twins import SEED

SAMPLES = {client: len(population().clients[client]["labels"]) for client in range(4)}
IDENTITY = RunIdentity(algorithm="fedavg", options={}, model="m", local="l", numbers=3, data="abc", seed=0, clients=5)


class Counting(Algorithm, frozen=True):
    """Every client keeps how often it trained, and returns that; a client may forget."""

    may_forget: bool = True

    def init_client(self, model: Tensor) -> Values | None:
        return {"times": torch.zeros(3)}

    @property
    def state_can_be_lost(self) -> bool:
        return self.may_forget

    @property
    def returns(self) -> Mapping[str, Combine]:
        return {"times": "mean"}

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        assert state is not None
        now = {"times": state["times"] + 1}
        return ClientUpdate(values=dict(now), state=now)


def flip(path: Path, at: int) -> None:
    """One bit of a value."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def work(algorithm: Algorithm) -> TrainingTask:
    return TrainingTask(algorithm=algorithm, local=LOCAL, seed=SEED)


def broadcast() -> Values:
    return {"model": torch.zeros(3)}


def opening(round_: int) -> PhaseSetup:
    return PhaseSetup(phase=PhaseId(round_), clients=4, samples=sum(SAMPLES.values()))


def trained(site: ClientTrainer, round_: int, states: Mapping[int, int]) -> dict[int, ClientTime]:
    """Clients that go on from these states, one by one."""
    site.open(opening(round_), broadcast())
    found: dict[int, ClientTime] = {}
    for client, state in states.items():
        (timed,), refused = site.train([ClientTask(client, SAMPLES[client], state)])
        assert not refused
        found[client] = timed
    site.hand_over()
    return found


@pytest.mark.parametrize("numbers", [3, LARGE_BYTES // 4 + 5])
@pytest.mark.parametrize("part", ["value", "padding", "header"])
def test_a_state_that_was_altered_is_not_read(numbers: int, part: str, tmp_path: Path) -> None:
    form = StateForm({"control": torch.zeros(numbers)})
    kept = StateStore(tmp_path, form)
    places = kept.write([1, 2], 0, {"control": torch.ones(2, numbers)})
    kept.flush()
    flip(Path(kept.path(places[0])), {"value": form.size_bytes - 6, "padding": form.size_bytes, "header": 40}[part])
    other = kept.read([2], places[1:])["control"]
    assert torch.equal(other, torch.ones(1, numbers))
    kept.expect(places)
    if part == "padding":  # nothing of the state
        assert torch.equal(kept.read([1], places[:1])["control"], torch.ones(1, numbers))
        return
    with pytest.raises(StateLost, match=r"client 1's.*damaged") as found:
        kept.read([1, 2], places)
    assert found.value.clients == {1}


def test_what_was_read_ahead_is_no_reason_to_lose_another_state(tmp_path: Path) -> None:
    kept = StateStore(tmp_path, StateForm({"control": torch.zeros(3)}))
    places = kept.write([1], 0, {"control": torch.ones(1, 3)})
    kept.flush()
    gone = kept._files.per_file  # of a file that is not there
    kept.expect([*places, gone])
    assert torch.equal(kept.read([1], places)["control"], torch.ones(1, 3))
    with pytest.raises(StateLost, match="missing") as found:
        kept.read([1, 2], [*places, gone])
    assert found.value.clients == {2}


def simulated(
    folder: Path, algorithm: Algorithm, log: Callable[[str], None]
) -> tuple[ClientTrainer, Callable[[int], Path]]:
    store = StateStore(folder, StateForm({"times": torch.zeros(3)}))
    return ClientTrainer(work(algorithm), module(), population(), store, log=log), lambda place: Path(store.path(place))


def test_a_client_begins_anew_where_the_algorithm_allows(tmp_path: Path) -> None:
    said: list[str] = []
    site, path = simulated(tmp_path, Counting(), said.append)
    first = trained(site, 0, dict.fromkeys(range(4), NONE))
    form = StateForm({"times": torch.zeros(3)})
    places = {client: timed.state for client, timed in first.items()}
    flip(path(places[2]), places[2] * 4096 + form.size_bytes - 2)
    second = trained(site, 1, places)
    assert [client for client, timed in second.items() if timed.renewed] == [2]
    assert len(said) == 1 and "client 2" in said[0] and "goes on with a new one" in said[0]
    third = trained(site, 2, {client: timed.state for client, timed in second.items()})
    assert not any(timed.renewed for timed in third.values())
    kept = StateStore(tmp_path, form).read(list(third), [timed.state for timed in third.values()])
    assert kept["times"][:, 0].tolist() == [3, 3, 2, 3]


def test_of_clients_trained_together_only_the_lost_one_begins_anew(tmp_path: Path) -> None:
    data, form = population(per_size=4), StateForm({"times": torch.zeros(3)})
    store = StateStore(tmp_path, form)
    places = store.write(range(4), 0, {"times": torch.full((4, 3), 7.0)})
    store.flush()
    for client in (1, 3):
        flip(Path(store.path(places[client])), places[client] * 4096 + form.size_bytes - 2)
    site = ClientTrainer(work(Counting()), module(), data, store)
    samples = int(data.sizes[0])
    site.open(PhaseSetup(phase=PhaseId(1), clients=4, samples=4 * samples), broadcast())
    timed, refused = site.train([ClientTask(client, samples, places[client]) for client in range(4)])
    site.hand_over()
    assert not refused and [t.client for t in timed if t.renewed] == [1, 3]
    assert store.read(range(4), [t.state for t in timed])["times"][:, 0].tolist() == [8, 1, 8, 1]


def test_where_it_does_not_allow_it_the_run_says_so(tmp_path: Path) -> None:
    site, path = simulated(tmp_path, Counting(may_forget=False), lambda _: None)
    place = trained(site, 0, {0: NONE})[0].state
    flip(path(place), len(StateForm({"times": torch.zeros(3)})))
    with pytest.raises(UserError, match="damaged since; the algorithm cannot go on without it"):
        trained(site, 1, {0: place})


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "round", "empty"])
@pytest.mark.parametrize("may_forget", [True, False])
def test_a_sites_damaged_state_is_not_used(damage: str, may_forget: bool, tmp_path: Path) -> None:
    said: list[str] = []
    form = StateForm({"times": torch.zeros(3)})
    site = Site(
        work(Counting(may_forget=may_forget)), module(), population(), SiteStates(tmp_path, form), log=said.append
    )
    assert trained(site, 0, {0: NONE})[0].state == 0
    assert not trained(site, 1, {0: 0})[0].renewed
    path = tmp_path / "round-000001.safetensors"
    whole = path.read_bytes()
    match damage:
        case "flip":
            flip(path, len(whole) - 2)
        case "cut" | "empty":
            path.write_bytes(whole[:-1] if damage == "cut" else b"")
        case "gone":
            path.unlink()
        case _:
            path.write_bytes((tmp_path / "round-000000.safetensors").read_bytes())
    if not may_forget:
        error, who = (PeerError, "coordinator: .*") if damage == "gone" else (UserError, "")
        with pytest.raises(error, match=rf"{who}state {path}: .*; the algorithm cannot go on without it"):
            trained(site, 2, {0: 1})
        return
    assert trained(site, 2, {0: 1})[0].renewed
    assert site.update is not None and site.update.values["times"].tolist() == [1, 1, 1]
    assert len(said) == 1 and str(path) in said[0]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_damaged_commit_is_passed_over_where_no_states_are_kept(keeps: bool, tmp_path: Path) -> None:
    commits, said = Commits(tmp_path, IDENTITY), list[str]()
    values = {"model": torch.ones(3, dtype=torch.bfloat16), "scale": torch.tensor(2.0), "none": torch.zeros(0)}
    states = np.arange(5, dtype=np.int32) if keeps else None
    paths = [commits.save(number, values, states) for number in range(2)]
    assert (found := commits.newest()) is not None and found.round == 1
    assert all(torch.equal(found.values[name], value) for name, value in values.items())
    flip(paths[1], len(paths[1].read_bytes()) - 1)
    if keeps:
        with pytest.raises(UserError, match=r"round-000001.*altered since; round 1 cannot be gone back to"):
            commits.newest()
        return
    assert (found := commits.newest(said.append)) is not None and found.round == 0
    assert len(said) == 1 and "round-000001" in said[0]
    flip(paths[0], 12)
    with pytest.raises(UserError, match=r"round-000001.*altered since"):
        commits.newest()


def test_a_commit_under_another_rounds_name_does_not_count(tmp_path: Path) -> None:
    commits = Commits(tmp_path, IDENTITY)
    path = commits.save(0, {"model": torch.ones(3)}, None)
    path.rename(tmp_path / "round-000007.safetensors")
    with pytest.raises(UserError, match="not as it was saved"):
        commits.newest()


@pytest.mark.parametrize("masked", [False, True])
def test_a_sites_state_follows_the_clipped_update_that_it_sends(masked: bool, tmp_path: Path) -> None:
    """SCAFFOLD's control variate moves by what the coordinator adds up, which clips what is clipped no further."""
    algorithm, rules = Scaffold(), AdmissionRules(max_norm=0.1, clip=True)
    model = Resident(module()).vector()
    clip = partial(bounded, rules=rules, change_of=algorithm.change)
    states = SiteStates(tmp_path, StateForm({"control": torch.zeros_like(model)}))
    site = Site(work(algorithm), module(), population(), states, rules=UpdateRules(clip=clip, masked=masked))
    site.open(opening(0), {"model": model, "control": torch.zeros_like(model)})
    ((timed,), refused) = site.train([ClientTask(0, SAMPLES[0], NONE)])
    assert not refused and site.update is not None
    sent = site.update.values
    assert math.sqrt(sum(float(v.norm()) ** 2 for v in sent.values())) == pytest.approx(0.1)
    assert clip(site.update) is site.update
    assert torch.equal(states.read([0], [timed.state])["control"][0], sent["control_delta"])


class Stubborn(Scaffold, frozen=True):
    """Keeps what it returned, whatever was counted of it."""

    free: bool = False

    @property
    def state_can_be_lost(self) -> bool:
        return self.free

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        update = super().client(local, broadcast, state)
        return ClientUpdate(values=update.values, state=update.kept(update.values))


def test_a_state_that_does_not_follow_clipped_values_is_refused(tmp_path: Path) -> None:
    model = Resident(module()).vector()
    form = StateForm({"control": torch.zeros_like(model)})
    clip = partial(bounded, rules=AdmissionRules(max_norm=0.1, clip=True))
    for free in (True, False):
        site = ClientTrainer(
            work(Stubborn(free=free)), module(), population(), StateStore(tmp_path / f"{free}", form), admit=clip
        )
        site.open(opening(0), {"model": model, "control": torch.zeros_like(model)})
        if free:
            site.train([ClientTask(0, SAMPLES[0], NONE)])
            continue
        with pytest.raises(UserError, match=r"values were clipped, and its state .* expected a function"):
            site.train([ClientTask(0, SAMPLES[0], NONE)])
