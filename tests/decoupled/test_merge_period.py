"""`[sync] period = "auto"`: against every period in the simulator, and what it says."""

from __future__ import annotations

import random

import msgspec
import pytest

from isthmus.api import decoupled
from isthmus.api.decoupled import LINK_SHARE, late_of, with_period
from isthmus.cost import SyncPolicy
from isthmus.errors import UserError
from isthmus.fleet import Link
from isthmus.job import Job
from isthmus.simulator.merging import FragmentBytes, ReplicaModel

from .small import job_of

BATCH = 16


def auto_job(quorum: int = 2, grace: float = 0.5) -> Job:
    job = job_of(quorum=quorum, grace=grace)
    return msgspec.structs.replace(job, sync=msgspec.structs.replace(job.sync, period="auto"))


def drawn(seed: int) -> tuple[list[ReplicaModel], FragmentBytes]:
    rng = random.Random(seed)
    models = [
        ReplicaModel(
            name=name,
            step_s=rng.uniform(0.05, 0.4),
            samples=4,
            up=Link(rng.uniform(0, 0.1), rng.uniform(1e5, 1e6)),
            down=Link(rng.uniform(0, 0.1), rng.uniform(1e5, 1e6)),
        )
        for name in "abcd"
    ]
    return models, FragmentBytes(delta=(20_000, 9_000), change=(20_000, 9_000), whole=(140_000, 63_000))


def is_too_short(period: int, models: list[ReplicaModel], sizes: FragmentBytes) -> bool:
    """Whether a link is busy for more than its share of the period."""
    batch_s = BATCH / sum(model.samples / model.step_s for model in models)
    ways = [(model.up, sizes.delta) for model in models] + [(model.down, sizes.change) for model in models]
    seconds = [sum(size) / link.bandwidth_bytes_per_s for link, size in ways if link is not None]
    return max(seconds) > LINK_SHARE * period * batch_s


@pytest.mark.parametrize("seed", range(4))
def test_no_contribution_is_late_and_a_period_less_is_refused(seed: int) -> None:
    models, sizes = drawn(seed)
    asked = auto_job(quorum=1 + seed % 3, grace=(0.1, 0.5)[seed % 2])
    planned, reason = with_period(asked, models, sizes)
    period = planned.sync.every
    assert reason.startswith(f"period {period}: the link of ")
    assert not is_too_short(period, models, sizes) and not late_of(asked, period, models, sizes)
    if period > 1:
        assert is_too_short(period - 1, models, sizes) or late_of(asked, period - 1, models, sizes)
    assert msgspec.structs.replace(planned, sync=asked.sync) == asked


@pytest.mark.parametrize(
    ("late_until", "expected"),
    [
        (0, "period 1: {} 1 s"),
        (2, "period 3: {} 3 s; with 2, 5 contributions to {} merges would be too late"),
        (99, "period 1: {} 1 s; with 1, 5 contributions to {} merges would be too late"),
    ],
)
def test_the_reason_names_the_link_and_what_a_period_less_would_do(
    late_until: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(_job: Job, period: int, *_: object) -> int:
        return 5 * (period <= late_until)

    monkeypatch.setattr(decoupled, "late_of", late)
    link = Link(0.0, 20e6 / 8)
    models = [
        ReplicaModel(name="home", step_s=1.0, samples=8),
        ReplicaModel(name="asia", step_s=1.0, samples=8, up=link),
    ]
    sizes = FragmentBytes(delta=(625_000, 625_000), change=(0, 0), whole=(1, 1))
    _, reason = with_period(auto_job(), models, sizes)
    carries = "the link of asia, 20 Mbit/s, carries 1.19 MiB in 500 ms of"
    assert reason == expected.format(carries, decoupled.SIMULATED_MERGES)


def test_a_period_that_is_a_number_stays() -> None:
    job = job_of()
    assert with_period(job, [], FragmentBytes(delta=(), change=(), whole=())) == (job, "")


def test_links_that_are_too_slow_for_the_run_are_refused() -> None:
    models, sizes = drawn(0)
    slow = [models[0], ReplicaModel(name="b", step_s=0.1, samples=4, up=Link(0.0, 100.0))]
    with pytest.raises(
        UserError, match=r"sync.period: got 'auto', expected faster links or a longer run: the link of b"
    ):
        with_period(auto_job(), slow, sizes)


def test_other_modes_have_no_period_to_plan() -> None:
    with pytest.raises(msgspec.ValidationError, match="period: got 'auto' with mode 'local', expected a number"):
        msgspec.convert({"mode": "local", "period": "auto"}, SyncPolicy)
