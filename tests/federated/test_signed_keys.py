"""Keys of secure aggregation are signed by devices of the fleet, and shares that are wrong are found."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest

from isthmus.errors import PeerError
from isthmus.federated.secure.recovery import private_of, seed_of
from isthmus.federated.secure.shamir import deal
from isthmus.federated.secure.site_secrets import SiteSecrets, key_of
from isthmus.protocol.federated_messages import PhaseId
from isthmus.protocol.secure_coordinator import Secrets
from isthmus.protocol.secure_messages import SealedShare, SiteKeys
from isthmus.runtime.identity import Authority
from isthmus.runtime.identity.signatures import DeviceSigner
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
    with pytest.raises(PeerError, match="a share that a did not deal"):
        sites["c"].open([SealedShare("a", for_b)])
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


def test_a_wrong_share_spoils_no_sum() -> None:
    draw = np.random.default_rng(0).bytes
    secret = bytes(31) + b"\1"
    shares = dict(enumerate(deal(secret, 3, 2, draw), start=1))
    public = key_of(secret).public_key().public_bytes_raw()
    keys = SiteKeys("a", bytes(32), public, hashlib.sha256(secret).digest())
    right = Secrets(keys=keys, shares={1: shares[1], 3: shares[3]})
    assert seed_of("a", right) == secret
    assert private_of("a", right).private_bytes_raw() == secret
    wrong = Secrets(keys=keys, shares={1: shares[2], 3: shares[3]})
    for recovered in (seed_of, private_of):
        with pytest.raises(PeerError, match="do not give it back: a site sent a wrong one"):
            recovered("a", wrong)
