"""The verdict on a plan document as a terminal table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.plan import Plan
from isthmus.report.tables import new_table, titled
from isthmus.verify import Verdict
from isthmus.verify.verdict import Figure


def verdict_table(verdict: Verdict, plan: Plan, source: str) -> RenderableType:
    """One row per field that differs, and what was done about the certificate."""
    words = "planner, notes and scope are words, and were not judged"
    if verdict.holds:
        head = Text(f"{source}: all {verdict.checked} figures hold ({words})")
        return Group(head, Text(f"certificate: {_certificate(plan)}{verdict.bound.told}"))
    table = new_table(("field", "document", "computed", "by"))
    for d in verdict.differences:
        table.add_row(*(Text(cell) for cell in (d.field, _shown(d.got), _shown(d.expected), d.by or "-")))
    title = f"{source}: {len(verdict.differences)} of {verdict.checked} figures do not hold"
    return titled(title, table, f"{words}\ncertificate: {_certificate(plan)}{verdict.bound.told}")


def _certificate(plan: Plan) -> str:
    stated = plan.certificate
    if stated is None:
        return ""
    unit = "per step in the fleet's prices" if stated.objective == "cost" else "s"
    return f"lower bound {stated.lower_bound:.6g} {unit}, gap {stated.gap:.2%}; "


def _shown(figure: Figure) -> str:
    return f"{figure:.9g}" if isinstance(figure, float) else str(figure)
