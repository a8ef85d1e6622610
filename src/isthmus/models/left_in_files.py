"""A pretrained model whose weights are not read: transformers loads it with a stand-in for each tensor of its files,
and the module then tells by its stand-ins which tensor of which file each of its variables is.

So no rule of the library is written down again here: prefixes, legacy names, tied weights and what it draws for
weights that the files lack are its own.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import tempfile
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor

from isthmus.models.model_folder import fetch_folder
from isthmus.stores import StoreFile

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COPY = re.compile(r"(.*\.)modules_to_save\.[^.]+(\..*)")
"""A variable of a layer that peft has copied, to train the copy."""


class NotInFiles(Exception):
    """A module's weights cannot be left in its files; says why."""


class Origin(NamedTuple):
    path: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: torch.dtype  # as the module has it
    copied: bool = False  # by peft, to be trained beside the original


class Origins:
    """The stand-ins of a module that was loaded inside `left_in_files`."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for what has to lie here of a model in a store, as long as `left_in_files` lasts."""
        self._found: dict[int, tuple[Origin, Tensor]] = {}
        self._folder = folder
        self.in_stores: dict[Path, StoreFile] = {}
        """Files of stores, by the paths in `folder` at which their headers are."""

    def headers(self, url: str) -> Path:
        """The folder of a model at a URL, with the headers of its weights alone. UserError as `fetch_folder`."""
        folder = self._folder / str(len(self.in_stores))
        folder.mkdir()
        self.in_stores |= fetch_folder(url, folder, "headers")
        return folder

    def __len__(self) -> int:
        return len(self._found)

    def of(self, variables: Mapping[str, Tensor]) -> dict[str, Origin]:
        """The tensors of files that variables are, without those whose values are in memory. Raises NotInFiles where a
        variable was computed from tensors of files."""
        found = {name: self._found[v.data_ptr()] for name, v in variables.items() if v.data_ptr() in self._found}
        for name, (origin, element) in found.items():
            variable = variables[name]
            if (variable.shape, variable.dtype) != (origin.shape, origin.dtype) or not element.isnan():
                raise NotInFiles(f"{name} is not as in {origin.path.name}")
        origins = {name: origin for name, (origin, _) in found.items()}
        for name, variable in variables.items():
            if name not in origins and variable.is_floating_point() and variable.isnan().any():
                copy = _COPY.fullmatch(name)
                original = origins.get(f"{copy[1]}original_module{copy[2]}") if copy else None
                if original is None or original.shape != variable.shape or original.dtype != variable.dtype:
                    raise NotInFiles(f"{name} is computed from weights of the files")
                origins[name] = original._replace(copied=True)
        return origins

    def stand_in(self, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """It takes the memory of one element, which is not a number: so is whatever is computed from it."""
        element = torch.full((), torch.nan, dtype=dtype)
        self._found[element.data_ptr()] = Origin(path, name, shape, dtype), element
        return element.expand(shape)


class _File:
    """An open file, as far as transformers uses it."""

    def __init__(self, origins: Origins, path: str, *arguments: object, **options: object) -> None:
        self._origins, self._path = origins, Path(path)
        self._file: Any = safe_open(path, *arguments, **options)  # pyright: ignore

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def get_slice(self, name: str) -> object:
        found = self._file.get_slice(name)
        return _Slice(self._origins, self._path, name, found) if found.get_dtype() in FLOATS else found


class _Slice:
    def __init__(self, origins: Origins, path: Path, name: str, found: Any) -> None:
        self._origins, self._path, self._name, self._found = origins, path, name, found

    def __getattr__(self, name: str) -> object:
        return getattr(self._found, name)

    def __getitem__(self, index: object) -> object:
        return self if index is Ellipsis else self._found[index]

    def to(self, *, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        own = FLOATS[self._found.get_dtype()]
        return self._origins.stand_in(self._path, self._name, tuple(self._found.get_shape()), dtype or own)


ACTIVE: ContextVar[Origins | None] = ContextVar("left_in_files", default=None)
"""The stand-ins of the innermost `left_in_files`."""


@contextlib.contextmanager
def left_in_files() -> Generator[Origins]:
    """While active, a pretrained model is loaded with stand-ins for floating-point tensors of its files. NotInFiles
    where the library would compute weights from several of them, or loads in a way that is not known."""
    with tempfile.TemporaryDirectory(prefix="isthmus-headers-") as folder:
        origins = Origins(Path(folder))
        token = ACTIVE.set(origins)
        try:
            with _patched(origins):
                yield origins
        finally:
            ACTIVE.reset(token)


@contextlib.contextmanager
def _patched(origins: Origins) -> Generator[None]:
    def converts(converter: object, layer_name: str, *_: object, **__: object) -> None:
        raise NotInFiles(f"{layer_name} is made of several weights of the files")

    def opened(path: str, *arguments: object, **options: object) -> _File:
        return _File(origins, path, *arguments, **options)

    loader = importlib.import_module("transformers.modeling_utils")
    converter = importlib.import_module("transformers.core_model_loading").WeightConverter
    with mock.patch.object(loader, "safe_open", opened), mock.patch.object(converter, "convert", converts):
        yield
