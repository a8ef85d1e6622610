"""The certificate: its question, its arithmetic, and its lower bound, which must be decided here again.

A document states a limit below which no plan is. The check asks the decisions (`prover`) for this limit alone: proven,
or not checked, which is no pass, where they leave it open or take more work or time than they may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from isthmus.plans import Certificate, question_in_words
from isthmus.units import format_duration
from isthmus.verification.prefixes import OutOfWork
from isthmus.verification.prover import ROUNDING, Prover, unproven
from isthmus.verification.question import CLOSE, BoundCheck, DifferenceList, Question

GAP_ROUNDING = 1e-7  # absolute: planners call a gap of rounding errors none


class PlanCost(NamedTuple):
    step_s: float  # a steady step's; 0 where the document states none
    price: float


class Until(NamedTuple):
    """When a check of a bound ends."""

    seconds: float
    ended: Callable[[], bool]


def is_priced(question: Question) -> bool:
    fleet = question.fleet
    some = any(d.price_per_hour for d in fleet.devices) or any(site.egress_price_per_gb for site in fleet.region_info)
    return some and question.constraints.objective == "cost"


def asked_in_words(question: Question) -> str:
    return question_in_words(
        question.constraints,
        question.counts,
        priced=is_priced(question),
        period=question.period,
        recompute=question.recompute,
    )


def check_certificate(
    ledger: DifferenceList, question: Question, certificate: Certificate | None, found: PlanCost, until: Until | None
) -> BoundCheck:
    """Judges every field of the certificate."""
    reason, priced = unproven(question), is_priced(question)
    if reason is not None:
        ledger.judge("certificate", certificate is None, "a bound", f"none; {reason}")
        return BoundCheck(status="none stated", text=reason)
    if certificate is None:
        return BoundCheck(status="none stated", text="the plan states no bound")
    _arithmetic(ledger, question, certificate, found.price if priced else found.step_s, priced)
    if ledger.differences:
        return BoundCheck(status="unchecked", text="not checked: other figures do not hold")
    prover, stated = Prover(question, priced=priced), certificate.lower_bound
    unit = "" if priced else " s"
    try:
        proven = prover.proves(stated * (1 - ROUNDING / 10), *([] if until is None else [until.ended]))
    except OutOfWork:
        within = "by as much work as a check may be"
        if until is not None and until.ended():
            within = f"within {format_duration(until.seconds)}"
        return BoundCheck(status="unchecked", text=f"not checked {within}", proven=prover.simple())
    if not proven:
        text = f"not proven: what is distinguished allows plans below {stated:.6g}{unit}"
        return BoundCheck(status="unchecked", proven=prover.simple(), text=text)
    return BoundCheck(status="proven", proven=stated, text="proven: no choice of devices and cuts may take less")


def _arithmetic(
    ledger: DifferenceList, question: Question, certificate: Certificate, reached: float, priced: bool
) -> None:
    ledger.same("certificate.question", certificate.question, asked_in_words(question))
    ledger.same("certificate.objective", certificate.objective, "cost" if priced else "step")
    stated = certificate.lower_bound
    if not ledger.judge("certificate.lower_bound", stated > 0, stated, "above 0: nothing proves nothing"):
        return
    most = f"at most the {'price of a step' if priced else 'simulated step'}, {reached:.9g}"
    ledger.judge("certificate.lower_bound", stated <= reached * (1 + CLOSE), stated, most)
    gap = reached / stated - 1
    ledger.judge("certificate.gap", abs(certificate.gap - gap) <= GAP_ROUNDING, certificate.gap, gap)
    ledger.same("certificate.exact", certificate.exact, gap <= GAP_ROUNDING)
