"""The folder in which a coordinator keeps its fleet over restarts: authority, own identity, roster, addresses.

Commands of the same user on the same machine (`isthmus ticket`, `isthmus devices`) open the same folder.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from isthmus.errors import UserError
from isthmus.locking import claimed
from isthmus.run_files import read_json
from isthmus.runtime.identity import Authority, Identity, Roster, Ticket, decode_ticket, encode_ticket
from isthmus.runtime.identity.files import private_folder, write_private

_ADDRESSES = "addresses.json"
_LEAVING = "leaving-"
_CLAIM = "serving.claim"
_REMEDY = "remove the folder it is in: `isthmus serve` makes another"
Addresses = tuple[tuple[str, int], ...]


def remove_state(folder: Path) -> None:
    """Remove the state that a coordinator which was killed has left. UserError while one serves."""
    if folder.is_dir():
        with _served(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _served(folder: Path) -> AbstractContextManager[None]:
    taken = "another coordinator serves this fleet: end it first, or choose another folder with --state"
    return claimed(folder / _CLAIM, f"state folder {folder}: {taken}")


class FleetState:
    """UserError when the folder cannot be used, or others may look into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder)
        self.authority = Authority(folder)
        self.roster = Roster(folder, self.authority.fingerprint)
        self.identity = Identity.made(folder / "coordinator", _REMEDY)
        self.renew()

    def renew(self) -> None:
        """Certify ourselves, where that is due. UserError for a certificate that is not of this fleet."""
        if self.identity.begun:
            self.identity.check(self.authority.der())
        if not self.identity.begun or self.identity.is_due(time.time()):
            _, certificate = self.authority.certify(self.identity.request(), "coordinator")
            self.identity.keep(certificate, self.authority.der())

    @contextlib.contextmanager
    def served(self) -> Generator[None]:
        """This process alone coordinates the fleet meanwhile: a second one would put its own address into all tickets
        from then on. UserError while another process does."""
        with _served(self.folder):
            yield

    def listens_at(self, addresses: Addresses) -> None:
        """Note how devices reach the coordinator."""
        write_private(self.folder / _ADDRESSES, msgspec.json.encode(addresses))

    def ticket(self) -> str:
        """A new ticket, as text. UserError before the fleet was ever served."""
        path = self.folder / _ADDRESSES
        addresses = read_json(path, Addresses, "; remove it and start `isthmus serve` again")
        if addresses is None:
            raise UserError(f"state folder {self.folder}: no fleet was served from it: start `isthmus serve`")
        secret, expires_s = self.roster.invite(time.time())
        return encode_ticket(Ticket(addresses, self.authority.fingerprint, secret, expires_s))

    def withdraw(self, ticket: str) -> None:
        """Nobody can join with this ticket any more, unless it was used already."""
        self.roster.withdraw(decode_ticket(ticket).secret)

    def devices(self) -> dict[str, list[str]]:
        """Names of the devices that joined, sorted, by machine; one may have a device of its own name, or one for each
        accelerator."""
        found: dict[str, list[str]] = {}
        for name in sorted(member.name for member in self.roster.members() if member.revoked_s is None):
            found.setdefault(name.partition("/")[0], []).append(name)
        return found

    def drain(self, device: str) -> None:
        """Have the device leave its run without loss. The coordinator that serves this folder looks for such wishes."""
        write_private(self.folder / f"{_LEAVING}{quote(device, safe='')}", b"")

    def take_leaving(self) -> list[str]:
        """Return who was asked to leave since this was called last."""
        found: list[str] = []
        for wish in sorted(self.folder.glob(f"{_LEAVING}*")):
            if not wish.is_file():
                continue
            wish.unlink(missing_ok=True)
            found.append(unquote(wish.name.removeprefix(_LEAVING)))
        return found

    def close(self) -> None:
        self.roster.close()
