"""Turn what torch.export throws into one line that names the module path, the user's line and what to change."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import traceback
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from types import TracebackType
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from isthmus.errors import UserError

PACKAGE = Path(__file__).parents[1]
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(PACKAGE / "models" / "registry.py"), "<")
LOUD = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export._trace")
WITHOUT_DATA = "compute with torch.where or a mask instead of `if`, `while`, .item(), .tolist() or x[mask]"
ASSIGNED = "assigned during export"
"""Torch's warning of attributes that a forward assigns: capture follows or refuses them, but for what RNNs cache."""
_shown: set[str] = set()
"""Warnings of this process: each mode is captured, and measured, with the same ones of other sizes."""
SCALAR_ERRORS = ("DataDependent", "DynamicOutputShape", "PendingUnbackedSymbolNotFound")


class ModulePath:
    """While active, knows which submodule's forward is running; after an error, which one raised it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stack: list[str] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> ModulePath:
        for name, module in self._module.named_modules():
            label = name or _title(self._module)
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
        return self._stack[-1] if self._stack else _title(self._module)


def _title(module: nn.Module) -> str:
    return str(getattr(module, "title", type(module).__name__))


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Torch prints graphs while it exports, and errors; ours is the one message a user sees. Warnings are shown when it
    is done, each once: they may be the only word on a result that differs."""
    loggers = [logging.getLogger(name) for name in LOUD]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
    for one in caught:
        text = re.sub(r"\bs\d+\b", "batch", str(one.message))
        alike = re.sub(r"\b(batch|\d+)\b", "#", text)
        known = alike in _shown or ASSIGNED in text or issubclass(one.category, DeprecationWarning | FutureWarning)
        if not known:
            _shown.add(alike)
            warnings.warn_explicit(text, one.category, one.filename, one.lineno)


@contextlib.contextmanager
def refuse_hooks() -> Generator[None]:
    """Refuse hooks and reentrant checkpointing, which change gradients beside autograd: the graph would lose them."""

    def refuse(*_: object, **__: object) -> None:
        raise UserError("model: it registers a hook on a tensor's gradient, which a cut model cannot run: leave it out")

    def refuse_reentrant(*_: object) -> None:
        raise UserError(
            "model: it uses reentrant checkpointing, whose backward a graph cannot hold: pass use_reentrant=False, or "
            "leave it out: a plan says which stages compute their forward again"
        )

    names = ("register_hook", "register_post_accumulate_grad_hook")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(Tensor, name, refuse))
        stack.enter_context(mock.patch.object(CheckpointFunction, "apply", refuse_reentrant))
        yield


def explain(error: Exception, path: ModulePath, columns: Mapping[str, Tensor]) -> UserError:
    """The UserError for an exception that came out of torch.export."""
    where = f"model: in module {path.current!r}{user_line(error)}"
    kind = type(error).__name__
    text = " ".join(str(error).split())
    if "data-dependent" in text or any(name in kind for name in SCALAR_ERRORS):
        return UserError(f"{where}: what it computes depends on the data of a tensor: {WITHOUT_DATA}")
    if ".numpy()" in text:
        return UserError(f"{where}: numpy is called on a tensor, which a graph cannot hold: use torch operators")
    if "doesn't match mode" in text:
        return UserError(f"{where}: forward changes a tensor that is an attribute: make it a buffer (register_buffer)")
    if type(error).__module__.startswith("torch."):
        return UserError(f"{where}: it cannot be captured as a graph: {kind}: {_first(text)}")
    if re.search(r"\bLong\b|\bint64\b", text):
        types = ", ".join(f"{name} {str(t.dtype).removeprefix('torch.')}" for name, t in columns.items())
        return UserError(f"{where}: class and token ids must be int64, the data's columns are {types}: {_first(text)}")
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    own = not innermost.startswith(LIBRARIES)
    return UserError(f"{where}: {kind}: {text[:300] if own else _first(text)}")


def where_in(node: fx.Node) -> str:
    """The start of a message about a node of an exported program: its module and the user's line."""
    own = _own_line(node)
    return f"model: in module {module_path(node) or _classes(node)[0]!r}{_line(*own) if own else ''}"


def source_of(node: fx.Node) -> str:
    """The class of the module whose forward called the node's operator, and the user's line: "Head, model.py:12"."""
    own = _own_line(node)
    return ", ".join([_classes(node)[-1], *([f"{Path(own[0]).name}:{own[1]}"] if own else [])])


def _own_line(node: fx.Node) -> tuple[str, str, str] | None:
    """File, number and text of the innermost line outside torch."""
    lines: list[tuple[str, str, str]] = re.findall(
        r'File "([^"]+)", line (\d+), in .*\n\s*(.+)', node.meta.get("stack_trace") or ""
    )
    own = [line for line in lines if not line[0].startswith(LIBRARIES)]
    return own[-1] if own else None


def _classes(node: fx.Node) -> list[str]:
    """Return the classes of the modules around it, from the user's outermost one inwards."""
    stack: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    return [str(kind).rpartition(".")[2] for _, kind in list(stack.values())[1:]] or ["(top)"]


def module_path(node: fx.Node) -> str:
    """Path of the submodule whose forward called the node's operator; empty for the module itself."""
    stack: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("module").removeprefix(".")


def user_line(error: Exception) -> str:
    """` (file.py:12: code)` of the innermost line outside torch, or nothing."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]
    return _line(frames[-1].filename, frames[-1].lineno, frames[-1].line or "") if frames else ""


def built_by(error: Exception) -> str:
    """The innermost module of the user's whose constructor raised the error, or "it"."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = (f.f_locals.get("self") for f in frames if not f.f_code.co_filename.startswith(LIBRARIES))
    modules = [part for part in own if isinstance(part, nn.Module)]
    return type(modules[-1]).__name__ if modules else "it"


def reason_of(error: Exception) -> str:
    kind, text = type(error).__name__, " ".join(str(error).split())
    if any(name in kind for name in SCALAR_ERRORS):
        return f"what it computes depends on the data of a tensor that has none yet: {WITHOUT_DATA}"
    return f"{kind}: {text[:300]}"


def _line(file: str, number: str | int | None, code: str) -> str:
    code = code.strip()
    return f" ({Path(file).name}:{number}: {code if len(code) <= 100 else code[:97] + '...'})"


def _first(text: str) -> str:
    """The first sentence; symbolic sizes are the batch."""
    sentence = re.split(r"(?<=[.;]) ", text, maxsplit=1)[0][:300].rstrip(".;")
    return re.sub(r"\bs\d+\b", "batch", sentence)
