"""A coordinator asks the devices that joined what their data are like, and has them compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.data import DataSpec
from isthmus.errors import PeerError, UserError
from isthmus.runtime.coordinator.data_holders import DataHolders, agreed
from isthmus.runtime.identity import Identity
from isthmus.runtime.identity.blinded_digests import blinded, proof
from isthmus.runtime.messages.fleet import CompareData
from isthmus.runtime.service.data_queries import MOST_UNPROVED, DataAnswers

from .holders import SPEC, Joined, write_samples
from .parties import soon


def test_equal_data_are_found_equal_and_others_named(joined: Joined, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        joined.add(name, write_samples(tmp_path / f"{name}-data", seed))
    holders = DataHolders(joined.fleet.service.asks(), SPEC, ("a", "b", "c"), heldout=True)
    holders.ask(["a", "b"])
    found = agreed(holders.described)
    assert (found.train, found.heldout, found.columns["pixel_values"].shape) == (30, 10, (4,))
    digests = {d: holders.described[d].digests["train"] for d in ("a", "b")}
    assert digests["a"] != digests["b"], "each under its own key"
    with pytest.raises(UserError, match="data: devices 'a' and 'c' have different training samples"):
        holders.ask(["c"])
    assert any("the data of device a are not equal to this one's" in line for line in joined.said)
    apart = DataHolders(joined.fleet.service.asks(), SPEC, ("a", "c"), heldout=False, alike=False)
    apart.ask()
    assert apart.described.keys() == {"a", "c"}


@pytest.mark.long
def test_what_a_device_may_not_or_cannot_say_names_device_and_field(joined: Joined, tmp_path: Path) -> None:
    joined.add("a", write_samples(tmp_path / "a-data"), kinds=("text",))
    joined.add("c", write_samples(tmp_path / "c-data"))
    joined.add("d", None)
    asks = joined.fleet.service.asks()
    (tmp_path / "c-data" / "link.npz").symlink_to(write_samples(tmp_path / "out") / "samples.npz")
    cases: list[tuple[str, dict[str, object], str]] = [
        ("a", SPEC.options, r"device 'a': data.kind: got 'npz', expected one of: text"),
        ("c", {"path": "../out/samples.npz"}, r"device 'c': data.path: got .*expected a relative path"),
        ("c", {"path": "link.npz"}, r"device 'c': data: 'link.npz' leads out of this device's data folder"),
        ("d", SPEC.options, r"device 'd': npz option 'path': no file samples.npz"),
    ]
    for device, options, words in cases:
        with pytest.raises(UserError, match=words):
            DataHolders(asks, DataSpec(kind="npz", options=options), (device,), heldout=False).ask()
    holders = DataHolders(asks, SPEC, ("a", "c", "d"), heldout=False, note=joined.said.append)
    holders.ask()
    assert holders.described.keys() == {"c"}, "who cannot read them is given no part that does"
    assert any("device 'd': npz option 'path'" in line and "no part that reads" in line for line in joined.said)
    with pytest.raises(UserError, match=r"device 'a': data.kind"):
        holders.ask(["c", "a"])


def test_a_device_that_left_is_not_waited_for(joined: Joined, tmp_path: Path) -> None:
    joined.add("a", write_samples(tmp_path / "a-data"))
    asks = joined.fleet.service.asks()
    joined.end()
    soon(lambda: not joined.fleet.service.present)
    found = asks.describe(["a"], SPEC, heldout=False)["a"]
    assert isinstance(found, PeerError) and "'a': left before it answered" in str(found)


def answering(identity: Identity) -> tuple[DataAnswers, str, list[str]]:
    said: list[str] = []
    answers, own = DataAnswers(said.append), blinded("the data", identity.data_key())
    answers._given.add(own)  # pyright: ignore[reportPrivateUsage]  # as if it had described them
    return answers, own, said


def test_guesses_are_found_out_and_come_to_an_end(device: Identity) -> None:
    """Somebody who does not have the data has a device show proofs for its guesses, or shows it some."""
    answers, own, said = answering(device)
    guesser, key = b"g" * 32, device.data_key()

    def guess(n: int, *, shown: bool) -> CompareData:
        others = blinded(f"guess {n}", guesser)
        told = proof(guesser, "x", "a", others, own) if shown else ""
        return CompareData(run="r", device="a", other="x", own=own, others=others, shown=told)

    assert answers.compare(guess(0, shown=True), key).equal is False
    assert said == ["the data of device x are not equal to this one's"]
    for n in range(1, MOST_UNPROVED):
        assert answers.compare(guess(n, shown=False), key).proof
    assert "compares its data no more" in answers.compare(guess(99, shown=False), key).failure
    shown = CompareData(run="r", device="a", other="x", own=own, others=guess(0, shown=True).others, shown="\u00e9")
    assert answers.compare(shown, key).equal is False
    unknown = CompareData(run="r", device="a", other="x", own="0" * 64, others=own)
    assert "not described" in answers.compare(unknown, key).failure


def test_what_is_no_digest_is_answered_as_such(device: Identity) -> None:
    answers, own, _ = answering(device)
    for nonsense in ("", "zz", "00" * 31, "00" * 32, "\u00e9" * 64):
        asked = CompareData(run="r", device="a", other="x", own=own, others=nonsense, shown="\u00e9")
        assert answers.compare(asked, device.data_key()).failure.startswith("cannot compare its data")


def test_comparisons_of_equal_data_never_end(device: Identity) -> None:
    answers, own, _ = answering(device)
    for n in range(2 * MOST_UNPROVED):
        other = n.to_bytes(32, "big")
        others = blinded("the data", other)
        first = CompareData(run="r", device="a", other="x", own=own, others=others)
        assert answers.compare(first, device.data_key()).proof
        shown = proof(other, "x", "a", others, own)
        back = CompareData(run="r", device="a", other="x", own=own, others=others, shown=shown)
        assert answers.compare(back, device.data_key()).equal
