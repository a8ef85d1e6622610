"""Every key of every file that people write, from the structs that read them, and tables of what files name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.data import dataset_kinds, describe_dataset
from isthmus.errors import UserError, unknown_name
from isthmus.federated import algorithm_names, describe_algorithm
from isthmus.federated.job import FederatedJob
from isthmus.federated.task_spec import SiteConfig
from isthmus.fleet.toml import TABLES as FLEET_TABLES
from isthmus.job import Job
from isthmus.job.sweep import SweepFile
from isthmus.models import describe_model, model_names, summarize_model
from isthmus.old_spelling import new_key, say_new
from isthmus.option_docs import OptionDoc, option_docs
from isthmus.report.tables import new_table
from isthmus.trackers import describe_tracker, tracker_names


class TableDoc(msgspec.Struct, frozen=True):
    """A table of a file: its heading, as `[training]` or `[[optimizer]]`, empty at the top of the file."""

    heading: str
    summary: str
    options: tuple[OptionDoc, ...]


FILES: Mapping[str, type[msgspec.Struct]] = {
    "Pipeline job": Job,
    "Federated job": FederatedJob,
    "Site": SiteConfig,
    "Sweep": SweepFile,
}


def tables_of(struct: type[msgspec.Struct], path: str = "", heading: str = "") -> Iterator[TableDoc]:
    """The tables of a file, outer ones first. A table that several places name is listed at each."""
    options = option_docs(struct)
    yield TableDoc(heading=heading, summary=_summary(struct), options=options)
    for option in options:
        below = f"{path}.{option.key}".lstrip(".")
        for inner in option.structs:
            many = option.type.startswith("list")
            yield from tables_of(inner, below, f"[[{below}]]" if many else f"[{below}]")


def tables_by_file() -> dict[str, tuple[TableDoc, ...]]:
    found = {title: tuple(tables_of(struct)) for title, struct in FILES.items()}
    fleet = (TableDoc(heading=h, summary=_summary(s), options=option_docs(s)) for h, s in FLEET_TABLES.items())
    return {**found, "Fleet": tuple(fleet)}


KINDS: Mapping[str, tuple[str, Callable[[], list[str]], Callable[[str], tuple[str, tuple[OptionDoc, ...]]]]] = {
    "model": ("[model] name", model_names, describe_model),
    "data set": ("[data] kind", dataset_kinds, describe_dataset),
    "algorithm": ("[federated] algorithm", algorithm_names, describe_algorithm),
    "tracker": ("[track] to", tracker_names, describe_tracker),
}
"""Kinds of things that a file names and that have options of their own: key, names, and description."""


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that files name: what it is, and the keys that it takes."""

    kind: str
    name: str
    where: str  # the key or the table that names it
    summary: str
    options: tuple[OptionDoc, ...]


def summaries(kind: str) -> dict[str, str]:
    """One line on each that is built in or registered by a package; of one that cannot be read, why not."""
    _, names, describe = KINDS[kind]

    def summary(name: str) -> str:
        try:
            return summarize_model(name) if kind == "model" else describe(name)[0]
        except UserError as e:  # one broken package must not hide the others
            return str(e)

    return {name: summary(name) for name in names()}


def described(name: str) -> list[Described]:
    """All that files can mean by a name: models, data sets, algorithms, `package.module:callable`, tables of files, and
    files themselves, as `site`, by the keys at their top.

    Raises UserError where it means nothing, or what it means cannot be read.
    """
    say_new([name])
    name, files = new_key(name), tables_by_file()
    named = [(table.heading.strip("[]") or file.lower(), file, table) for file in files for table in files[file]]
    found = [
        Described(kind="table", name=t.heading or "at the top", where=file, summary=t.summary, options=t.options)
        for heading, file, t in named
        if heading == name
    ]
    for kind, (where, names, describe) in KINDS.items():
        # a callable is shown by its arguments, whatever it is for
        if name in names() or (":" in name and kind == "model"):
            summary, options = describe(name)
            found.append(Described(kind=kind, name=name, where=where, summary=summary, options=options))
    if not found:
        known = {one for _, names, _ in KINDS.values() for one in names()}
        raise unknown_name("name", name, known.union(heading for heading, _, _ in named))
    return found


def option_rows(options: Iterable[OptionDoc]) -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning)"""
    for option in options:
        yield option.key, option.type, option.default, option.meaning


def described_table(one: Described) -> RenderableType:
    table = new_table(("key", "type", "default", "meaning"))
    table.columns[0].no_wrap = True
    for key, kind, default, meaning in option_rows(one.options):
        table.add_row(Text(key, "bold"), Text(kind), Text(default), Text(meaning))
    title = f"{one.name} ({one.kind}, {one.where})"
    if not one.options:
        return Group(Text(title, "bold"), Text(one.summary), Text("It takes no options."), Text())
    return Group(Text(title, "bold"), Text(one.summary), table, Text())


def _summary(struct: type[msgspec.Struct]) -> str:
    """The first paragraph of the docstring."""
    return " ".join((inspect.getdoc(struct) or "").partition("\n\n")[0].split())
