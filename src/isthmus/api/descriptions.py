"""Options of models, data sets and algorithms, and keys of a job's tables, as the reference describes them."""

from __future__ import annotations

from isthmus.report.settings_reference import KINDS, Described, described, described_table, summaries

__all__ = ["KINDS", "Described", "described", "described_table", "plain", "summaries"]


def plain(one: Described) -> dict[str, object]:
    """Return the description as JSON has it."""
    keys = ("key", "type", "default", "meaning")
    options = [{key: getattr(option, key) for key in keys} for option in one.options]
    return {"kind": one.kind, "name": one.name, "where": one.where, "summary": one.summary, "options": options}
