"""The verdict on a plan document as a terminal table."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from isthmus.plans import Plan
from isthmus.report.certificates import certificate_text
from isthmus.report.tables import new_table, titled
from isthmus.verification import Verdict
from isthmus.verification.question import Figure


def verdict_table(verdict: Verdict, plan: Plan, source: str) -> RenderableType:
    """One row per field that differs, and what was done about the certificate."""
    words = "planner and notes are words, and were not judged"
    bound = [f"bound {verdict.bound.text}"]
    if verdict.bound.status == "unchecked":
        bound.append("A bound that was not checked is no pass; --bound-unchecked passes it.")
    if plan.certificate is not None:
        bound.insert(0, f"certificate: {certificate_text(plan.certificate)}")
    if not verdict.differences:
        return Text("\n".join([f"{source}: all {verdict.checked} figures hold ({words})", *bound]))
    table = new_table(("field", "document", "computed", "by"))
    for d in verdict.differences:
        table.add_row(*(Text(cell) for cell in (d.field, _shown(d.got), _shown(d.expected), d.by or "-")))
    title = f"{source}: {len(verdict.differences)} of {verdict.checked} figures do not hold"
    return titled(title, table, "\n".join([words, *bound]))


def _shown(figure: Figure) -> str:
    return f"{figure:.9g}" if isinstance(figure, float) else str(figure)
