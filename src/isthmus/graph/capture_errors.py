"""Turn what torch.export throws into one line that names the module path, the user's line and what to change."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import TracebackType

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from isthmus.errors import UserError

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


class ModulePath:
    """While active, knows which submodule's forward is running; after an error, which one raised it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stack: list[str] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> ModulePath:
        for name, module in self._module.named_modules():
            label = name or type(self._module).__name__
            self._hooks.append(module.register_forward_pre_hook(lambda *_, label=label: self._stack.append(label)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave()))
        return self

    def _leave(self) -> None:
        if self._stack:
            self._stack.pop()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def current(self) -> str:
        return self._stack[-1] if self._stack else type(self._module).__name__


def explain(error: Exception, path: ModulePath, columns: tuple[str, ...]) -> UserError:
    """The UserError for an exception that came out of torch.export."""
    where = f"model: in module {path.current!r}{_user_line(error)}"
    text = " ".join(str(error).split())
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        return UserError(
            f"{where}: control flow depends on the data of a tensor: "
            "use torch.where or a mask in place of `if`, `while` or `.item()` on a tensor"
        )
    if isinstance(error, TypeError) and "argument" in text:
        return UserError(f"{where}: forward does not accept the data's columns {list(columns)}: {_first(text)}")
    return UserError(
        f"{where}: torch.export cannot take it: {type(error).__name__}: {_first(text)}; "
        "rewrite that line with tensor operators only"
    )


def _first(text: str) -> str:
    return re.split(r"(?<=[.;]) ", text, maxsplit=1)[0][:300]


def _user_line(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]
    if not frames:
        return ""
    frame = frames[-1]
    return f" ({Path(frame.filename).name}:{frame.lineno}: {(frame.line or '').strip()})"
