"""`docs/reference/python.md`: the names of `import isthmus`, with signatures and docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

import isthmus
from isthmus.api.given import Given
from isthmus.api.training import GivenClients
from isthmus.option_docs import field_docs

ARGUMENTS = {"train": Given, "federate": GivenClients}
"""Functions with further keyword arguments, and the typed dict that lists them."""
FUNCTIONS = [  # the most used first
    "train",
    "federate",
    "plan",
    "simulate",
    "compare",
    "verify",
    "what_if",
    "sweep",
    "serve",
    "join",
    "probe",
    "up",
]
MODULES = ("errors", "sync")
FILES = ("FederatedJob", "Job", "Track")  # their fields are keys of files
WIDTH = 100


def python_page() -> str:
    classes = [name for name in isthmus.__all__ if name not in (*FUNCTIONS, *MODULES)]
    parts = [
        "# Python",
        "The names of `import isthmus`. This page is made from the code (`make reference`). `import isthmus` loads "
        "nothing heavy; each name is imported when it is used. [Python](../python.md) shows how to use them, and "
        "[packages](packages.md) lists what else is public.",
        f"Functions: {_links(FUNCTIONS)}.",
        f"Classes: {_links(classes)}.",
        "Modules: `isthmus.errors` has every error that a caller may catch; `isthmus.sync` is for "
        "[torchrun scripts](../sync.md).",
    ]
    for name in FUNCTIONS:
        parts += _function(name, getattr(isthmus, name))
    for name in classes:
        parts += _class(name, getattr(isthmus, name))
    return "\n\n".join(parts) + "\n"


def _links(names: list[str]) -> str:
    return ", ".join(f"[`{name}`](#isthmus{name.lower()})" for name in names)


def _function(name: str, function: object) -> Iterator[str]:
    yield f"## `isthmus.{name}`"
    yield _signature(name, function)
    yield from _text(function)
    if name in ARGUMENTS:
        yield "Further arguments, by keyword:"
        yield from _fields(ARGUMENTS[name])


def _class(name: str, cls: type) -> Iterator[str]:
    yield f"## `isthmus.{name}`"
    yield from _text(cls)
    if name in FILES:
        yield "Its fields are the keys of the file: [Files](files.md)."
    else:
        yield from _fields(cls)
    for method, found in vars(cls).items():
        called = getattr(found, "__func__", found)
        if not method.startswith("_") and inspect.isfunction(called):
            yield _signature(f"{name}.{method}", called)
            yield from _text(called)
        elif isinstance(found, property):
            summary = next(_text(found.fget), "").partition("\n\n")[0]
            yield f"`{name}.{method}`" + (f": {summary}" if summary else "")


def _signature(name: str, function: object) -> str:
    """One line, or one argument per line."""
    signature = inspect.signature(function)  # pyright: ignore[reportArgumentType]
    parts = [_parameter(p) for p in signature.parameters.values()]
    keyword = next((i for i, p in enumerate(signature.parameters.values()) if p.kind is p.KEYWORD_ONLY), None)
    variable = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    if keyword is not None and not variable:
        parts.insert(keyword, "*")
    returned = signature.return_annotation
    after = "" if returned is signature.empty else f" -> {returned}"
    line = f"{name}({', '.join(parts)}){after}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){after}"
    return f"```py\n{re.sub(r' at 0x[0-9a-f]+', '', line)}\n```"


def _parameter(parameter: inspect.Parameter) -> str:
    """As in the source: annotations there are no strings."""
    hint = parameter.annotation
    bare = str(parameter.replace(annotation=inspect.Parameter.empty))
    if hint is inspect.Parameter.empty:
        return bare
    name, equals, default = bare.partition("=")
    return f"{name}: {hint}" + (f" = {default}" if equals else "")


def _text(described: object) -> Iterator[str]:
    """The docstring: doctests become blocks."""
    for paragraph in (inspect.getdoc(described) or "").split("\n\n"):
        if paragraph.startswith(">>>"):
            yield f"```pycon\n{paragraph}\n```"
        elif paragraph.startswith("    "):
            yield f"```py\n{textwrap.dedent(paragraph)}\n```"
        elif paragraph:
            yield paragraph


def _fields(cls: type) -> Iterator[str]:
    """The fields that a class declares, with what its source says of them; those of its bases come first."""
    rows = {
        name: (ast.unparse(annotation), meaning)
        for one in reversed([*_bases(cls)])
        for name, annotation, meaning in field_docs(one)
        if not name.startswith("_")
    }
    if rows:
        table = [f"| `{name}` | `{_escaped(kind)}` | {_escaped(text)} |" for name, (kind, text) in rows.items()]
        yield "\n".join(["| field | type | meaning |", "|---|---|---|", *table])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _bases(cls: type) -> Iterator[type]:
    """The class, and what it derives from within Isthmus. Typed dicts keep their bases elsewhere."""
    yield cls
    for base in getattr(cls, "__orig_bases__", cls.__bases__):
        if getattr(base, "__module__", "").startswith("isthmus."):
            yield from _bases(base)
