"""A folder with a file or a folder for each client."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from isthmus.data.within import check_within
from isthmus.errors import UserError

KIND = "clients"
PATH = {"text": "files"}  # a kind's option for the place of its samples, where it is not `path`


class ClientsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder with a file or a folder for each client: clients/alice.csv, or clients/alice/."""

    path: str  # The folder. Its files and folders are the clients, in the order of their names; hidden ones are none.
    kind: Literal["csv", "npz", "image-folder", "image-parquet", "text", "disk"] = "csv"
    """The kind of each client's data."""
    options: dict[str, object] = {}
    """Options of that kind, but where its samples are. Classes of images are to be named: a client may have only
    some."""
    heldout_path: str | None = None
    """Held-out samples of all clients together, of that kind; then all samples of the clients train."""


class ClientFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    options: dict[str, object]


def client_files(options: ClientsOptions) -> list[ClientFile]:
    """UserError for a folder that is missing or empty, and options that the clients' files decide."""
    key = PATH.get(options.kind, "path")
    if taken := {key, "heldout_path"} & options.options.keys():
        raise UserError(f"{KIND} option 'options': got {min(taken)!r}, expected none: `path` says where clients are")
    if options.kind == "image-folder" and not options.options.get("classes"):
        raise UserError(
            f"{KIND} option 'options': classes: missing, expected the names of all classes: a client may have only some"
        )
    folder = Path(options.path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{KIND} option 'path': no folder {options.path}")
    check_within(folder)
    found = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    if not found:
        raise UserError(f"{KIND} option 'path': {options.path} holds no file and no folder, expected one per client")
    names = [_name(one) for one in found]
    if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise UserError(f"{KIND} option 'path': {options.path} holds {twice!r} twice, expected one per client")
    shared = dict(options.options)
    if options.heldout_path is not None:
        shared["heldout_path"] = _place(Path(options.heldout_path).expanduser(), options.kind)
    return [
        ClientFile(name=_name(one), kind=options.kind, options={**shared, key: _place(one, options.kind)})
        for one in found
    ]


def _name(entry: Path) -> str:
    return entry.name if entry.is_dir() else entry.stem


def _place(entry: Path, kind: str) -> str:
    return str(entry / "*") if kind == "text" and entry.is_dir() else str(entry)
