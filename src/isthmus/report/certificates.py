"""A certificate in one sentence: what no plan undercuts, by how much this one is above it, and of which question."""

from __future__ import annotations

from isthmus.plans import Certificate, is_of_any_plan
from isthmus.units import format_duration


def bound_text(certificate: Certificate) -> str:
    """The bound with its unit."""
    if certificate.objective == "cost":
        return f"{1000 * certificate.lower_bound:.4g} per 1,000 steps"
    return format_duration(certificate.lower_bound)


def certificate_text(certificate: Certificate) -> str:
    """With the question in full."""
    known = "at best" if certificate.exact else "at least"
    return f"gap {certificate.gap:.2%} to a lower bound: {known} {bound_text(certificate)} is {certificate.question}"


def proof_text(certificate: Certificate) -> str:
    """For a reader who knows no bounds."""
    best = "cheapest" if certificate.objective == "cost" else "best"
    whose = "possible plan" if is_of_any_plan(certificate.question) else "plan of this planner's kind"
    how = "to be" if certificate.gap == 0 else f"within {100 * certificate.gap:.1f} % of"
    return f"Proven {how} the {best} {whose}"
