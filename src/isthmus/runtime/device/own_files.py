"""Weights that a device reads itself: from files of its own, in a folder of the job's path or the Hugging Face cache,
or by ranges from a store.

Neither a path nor the name of a file in the cache proves anything: a tensor is taken if its bytes have the digest that
the coordinator computed of its own. What it has not read has none: of a store's file both see one size and version.
Parts of checkpoints in a store have the digests that the devices gave which wrote them.
The coordinator of another owner may name files below the folder where the device runs, files of the cache by their
commit, and URLs below those that the device's owner names; it learns only whether they are those that it has.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

import torch
from torch import Tensor

from isthmus.data.within import check_within, confined_to
from isthmus.errors import UserError
from isthmus.protocol.run_messages import FileTensor, WeightFile
from isthmus.stores import StoreFile, is_url
from isthmus.training.layout import TensorHeader, receive_buffer, row_stride, unpack
from isthmus.training.stored import DTYPES, Sent, StoredTensor, other_bytes, stored_tensors

COMMIT = re.compile("[0-9a-f]{40}")
_NOT_PLAIN = re.compile(r"::|[\\?#%\s]|[^ -~]|/\.{0,2}(/|$)")
"""In what follows a URL's protocol: what fsspec or a server may take for another URL or folder than it looks like."""


def own_weights(
    files: Sequence[WeightFile],
    *,
    foreign: bool = False,
    urls: Sequence[str] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Sent], dict[str, str]]:
    """The tensors that this device can read, those of files where they are, and by name those that it cannot, each with
    the reason. `foreign`: another owner's coordinator asks, who is not to see the reasons, and for whom only URLs below
    `urls` are read. Where `stopped` says so, nobody wants them any more."""
    found: dict[str, Sent] = {}
    lacking: dict[str, str] = {}
    for file in files:
        try:
            if is_url(file.model):
                found |= _fetched(file, urls if foreign else None, stopped)
                continue
            there = stored_tensors(_located(file, foreign))
        # ValueError: of an id that no hub knows; RuntimeError: of the home of a user who is not here.
        except (UserError, OSError, ImportError, ValueError, RuntimeError) as e:
            lacking |= dict.fromkeys((asked.name for asked in file.tensors), str(e))
            continue
        for asked in file.tensors:
            try:
                found[asked.name] = _checked(asked, there)
            except (UserError, OSError) as e:
                lacking[asked.name] = str(e)
    return found, lacking


def is_below(url: str, urls: Sequence[str]) -> bool:
    """Return whether a file's URL lies below one of these, for every library that reads it.

    >>> [is_below(f"s3://bucket/{file}", ["s3://bucket/models"]) for file in ("models/a", "models-2/a", "models/../a")]
    [True, False, False]
    """
    if not is_url(url) or _NOT_PLAIN.search("/" + url.partition("://")[2].removeprefix("/")):
        return False
    return any(url.startswith(f"{one.rstrip('/')}/") for one in urls)


def _fetched(file: WeightFile, urls: Sequence[str] | None, stopped: Callable[[], bool]) -> dict[str, Tensor]:
    """Tensors of a store's file; `urls` are those below which it may lie, None for any."""
    url = f"{file.model.rstrip('/')}/{file.file}"
    if urls is not None and not is_below(url, urls):
        raise UserError(
            f"{url}: lies below no URL of this device's --weights-from or --checkpoints-to: {', '.join(urls) or 'none'}"
        )
    store = StoreFile(file.model.rstrip("/"), file.file, file.size, file.version)
    store.check()  # before memory is allocated for what it holds
    wanted: list[tuple[int, memoryview]] = []
    made: dict[str, Tensor] = {}
    for asked in file.tensors:
        if asked.dtype not in DTYPES.values() or asked.cast not in ("", *DTYPES.values()):
            raise UserError(f"{url}: tensor {asked.key!r} is of type {asked.dtype}, expected one that the format has")
        header = TensorHeader(asked.name, asked.dtype, asked.shape, row_stride(asked.shape))
        if asked.offset + header.nbytes > file.size:
            raise UserError(f"{url}: tensor {asked.key!r} ends beyond its {file.size} bytes")
        flat, buffer = receive_buffer(header)
        wanted.append((asked.offset, buffer))
        made[asked.name] = unpack(flat, header)
    if not store.fill(wanted, stopped):
        return {}
    for asked, (_, buffer) in zip(file.tensors, wanted, strict=True):
        if asked.sha256 not in ("", hashlib.sha256(buffer).hexdigest()):
            raise UserError(f"{url}: {other_bytes(asked.key)}")
    casts = {asked.name: asked.cast for asked in file.tensors if asked.cast}
    for name in casts:
        made[name] = made[name].to(getattr(torch, casts[name]))
    return made


def _located(file: WeightFile, foreign: bool) -> Path:
    path = Path(file.model).expanduser() / file.file
    if ".." in PurePath(file.file).parts or PurePath(file.file).is_absolute():
        raise UserError(f"{file.file}: expected a file below the model's folder")
    if file.commit:
        if not COMMIT.fullmatch(file.commit):
            raise UserError(f"{file.model}: commit {file.commit!r}, expected 40 hexadecimal digits")
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  # an extra

        cached = try_to_load_from_cache(file.model, file.file, revision=file.commit)
        if not isinstance(cached, str):
            raise UserError(f"{file.model}: {file.file} of commit {file.commit[:12]} is not in this device's cache")
        path = Path(cached)
    elif foreign:
        if file.model.startswith("~") or PurePath(file.model).is_absolute() or ".." in PurePath(file.model).parts:
            raise UserError(f"{file.model}: another owner's coordinator names no file outside of this folder")
        with confined_to(Path.cwd()):
            check_within(path)
    if not path.name.endswith(".safetensors") or not path.is_file():
        raise UserError(f"{path}: no such file here")
    return path


def _checked(asked: FileTensor, there: Mapping[str, StoredTensor]) -> StoredTensor:
    stored = there.get(asked.key)
    if stored is None or (stored.header.dtype, stored.header.shape) != (asked.dtype, asked.shape):
        raise UserError(f"tensor {asked.key!r} is not in the file, or of another type or shape")
    digest = hashlib.sha256()
    for piece in stored.pieces():
        digest.update(piece)
    if digest.hexdigest() != asked.sha256:
        raise UserError(f"{stored.path}: tensor {asked.key!r} has other bytes than the coordinator's")
    return stored.cast(getattr(torch, asked.cast)) if asked.cast else stored
