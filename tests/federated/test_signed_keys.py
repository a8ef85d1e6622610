"""Keys of secure aggregation are signed by devices of the fleet, and shares that are wrong are found."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import msgspec
import numpy as np
import pytest

from isthmus.errors import PeerError
from isthmus.federated.secure.recovery import ShareSearch
from isthmus.federated.secure.shamir import deal
from isthmus.federated.secure.site_secrets import SiteSecrets, key_of
from isthmus.programs.masked import Secrets
from isthmus.protocol.federated_messages import PhaseId
from isthmus.protocol.secure_messages import SealedShare, SiteKeys
from isthmus.runtime.identity import Authority
from isthmus.runtime.identity.keys import DeviceSigner
from tests.fleet_service.parties import certified

PHASE = PhaseId(3)


@pytest.fixture(scope="module")
def signers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DeviceSigner]:
    """Three devices of one fleet, its coordinator, and a device of another fleet."""
    folder = tmp_path_factory.mktemp("fleet")
    authority, other = Authority(folder / "authority"), Authority(folder / "other")
    found = {name: DeviceSigner(certified(authority, folder / name)) for name in ("a", "b", "c")}
    found["coordinator"] = DeviceSigner(certified(authority, folder / "coordinator", "coordinator"))
    found["stranger"] = DeviceSigner(certified(other, folder / "stranger"))
    return found


def of(name: str, signer: DeviceSigner, run: str = "run", phase: PhaseId = PHASE) -> SiteSecrets:
    return SiteSecrets(name, run, phase, signer)


def test_a_share_is_read_by_its_holder_alone(signers: dict[str, DeviceSigner]) -> None:
    sites = {name: of(name, signers[name]) for name in ("a", "b", "c")}
    keys = {name: site.public() for name, site in sites.items()}
    dealt = {name: site.deal([keys[n] for n in sites if n != name], 2) for name, site in sites.items()}
    for_b = next(share.sealed for share in dealt["a"] if share.site == "b")
    sites["b"].open([SealedShare("a", for_b)])
    assert sites["c"].open([SealedShare("a", for_b)]) == ("a",)
    assert len(set(sites["a"].devices.values())) == 2


@pytest.mark.parametrize("name", ["stranger", "coordinator"])
def test_keys_that_no_device_of_the_fleet_signed_are_refused(name: str, signers: dict[str, DeviceSigner]) -> None:
    with pytest.raises(PeerError, match="signed"):
        of("a", signers["a"]).deal([of("b", signers[name]).public()], 2)


@pytest.mark.parametrize("change", ["cipher", "mask", "commitment", "site", "signature"])
def test_keys_that_were_changed_are_refused(change: str, signers: dict[str, DeviceSigner]) -> None:
    keys = of("b", signers["b"]).public()
    other = "c" if change == "site" else bytes(32)
    with pytest.raises(PeerError, match="not signed by a device of this fleet"):
        of("a", signers["a"]).deal([msgspec.structs.replace(keys, **{change: other})], 2)


def test_keys_of_another_phase_or_run_are_refused(signers: dict[str, DeviceSigner]) -> None:
    for old in (of("b", signers["b"], phase=PhaseId(2)), of("b", signers["b"], run="other")):
        with pytest.raises(PeerError, match="not signed"):
            of("a", signers["a"]).deal([old.public()], 2)


def test_one_device_under_two_names_is_refused(signers: dict[str, DeviceSigner]) -> None:
    twice = [of("b", signers["b"]).public(), of("c", signers["b"]).public()]
    with pytest.raises(PeerError, match="one device under two names"):
        of("a", signers["a"]).deal(twice, 2)


def dealt(holders: int, threshold: int, wrong: Collection[int] = ()) -> tuple[bytes, Secrets]:
    """A secret, and its shares by holders of these names, of which some are of another one."""
    draw = np.random.default_rng(0).bytes
    secret = bytes(31) + b"\1"
    shares = dict(enumerate(deal(secret, holders, threshold, draw), start=1))
    shares |= {
        number: share for number, share in enumerate(deal(bytes(32), holders, threshold, draw), 1) if number in wrong
    }
    keys = SiteKeys("a", bytes(32), key_of(secret).public_key().public_bytes_raw(), hashlib.sha256(secret).digest())
    names = {number: f"site {number}" for number in shares}
    return secret, Secrets(keys=keys, shares=shares, threshold=threshold, holders=names)


@pytest.mark.parametrize(
    ("holders", "threshold", "wrong", "told"),
    [
        (3, 2, [1], True),
        (5, 3, [4], True),
        (5, 3, [1, 2], False),
        (5, 2, [1, 2, 3], False),
        (40, 21, [3, 30], True),
    ],
)
def test_a_wrong_share_is_worked_around_and_told(holders: int, threshold: int, wrong: list[int], told: bool) -> None:
    """The honest ones are enough: the secret is the one that was committed to, whichever shares are wrong. Which ones
    are is told unless as few liars could make the others look so: 2 a > n + t - 2."""
    secret, secrets = dealt(holders, threshold, wrong)
    for recover in (lambda s: s.seed_of("a", secrets), lambda s: s.private_of("a", secrets).private_bytes_raw()):
        search = ShareSearch()
        assert recover(search) == secret
        assert search.wrong == ({(f"site {number}", "a") for number in wrong} if told else set())


PRIME = 2**255 - 19


def test_liars_whose_errors_cancel_make_no_honest_share_wrong() -> None:
    """Of seven holders the fourth is gone; the first and the third add one: with the second and the fifth as well, the
    secret comes from a polynomial that is not the owner's. Honest shares count in the secrets that come after."""
    search = ShareSearch()
    for _ in range(2):
        secret, secrets = dealt(7, 4)
        shares = {number: share for number, share in secrets.shares.items() if number != 4}
        for number in (1, 3):
            more = (int.from_bytes(shares[number], "little") + 1) % PRIME
            shares[number] = more.to_bytes(32, "little")
        assert search.seed_of("a", msgspec.structs.replace(secrets, shares=shares)) == secret
    assert search.wrong == set()


def test_shares_of_a_doubted_holder_are_tried_where_the_others_do_not_fit() -> None:
    """One of four spoilt its share of the first secret, another one of the second: three are right."""
    search = ShareSearch()
    for wrong in (1, 2):
        secret, secrets = dealt(4, 3, [wrong])
        assert search.seed_of(f"owner {wrong}", secrets) == secret
    assert search.wrong == {("site 1", "owner 1"), ("site 2", "owner 2")}


def test_a_share_that_is_no_number_is_a_wrong_one() -> None:
    secret, secrets = dealt(3, 2)
    search = ShareSearch()
    odd = msgspec.structs.replace(secrets, shares={**secrets.shares, 1: b"\xff" * 32})
    assert search.seed_of("a", odd) == secret
    assert search.wrong == {("site 1", "a")}


def test_too_few_right_shares_spoil_no_sum() -> None:
    _, secrets = dealt(4, 3, [1, 2])
    with pytest.raises(PeerError, match="the shares of a's seed do not give it back: dealt or sent wrong"):
        ShareSearch().seed_of("a", secrets)
