"""The certificate: its question, its arithmetic, and its lower bound, which must be proven here too.

A bound that one computed here without a search reaches is proven. Above that, a relaxation (`prover`) may prove it, and
branch and bound looks for a plan below it: none, and it is proven; one, and it is refuted; out of work, and it was not
checked, which is no pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from isthmus.plans import Certificate, question_in_words
from isthmus.verification.bound import NEVER, Bounds
from isthmus.verification.closed_form import ClosedForm, Setup
from isthmus.verification.feeding import relaxed
from isthmus.verification.pipelines import Goal
from isthmus.verification.price import several_price, single_price
from isthmus.verification.prover import BoundParts
from isthmus.verification.question import CLOSE, BoundCheck, DifferenceList, Question
from isthmus.verification.reading import GraphReading
from isthmus.verification.search import OutOfWork, PlanSearch, SearchResult
from isthmus.verification.walks import walkable

MOST_NEAR = 240


def near(reading: GraphReading, setups: Sequence[Setup]) -> Iterator[list[Setup]]:
    """Plans that differ from the document's in one thing, each with its best choice of stages that recompute."""
    setups = [setup._replace(recompute=None) for setup in setups]
    kinds: list[Iterable[list[Setup]]] = []
    used = {device for setup in setups for device in setup.devices}
    idle = [name for name in reading.question.fleet.names if name not in used]
    for number, setup in enumerate(setups):
        for changes in (_moved(reading, setup), _swapped(setup), _merged(setup), _replaced(setup, idle)):
            kinds.append(_with(setups, number, changes))
    kinds += [_shared_otherwise(setups), [setups]]
    in_turn = (plan for row in itertools.zip_longest(*kinds) for plan in row if plan is not None)
    return itertools.islice(in_turn, MOST_NEAR)


def _with(setups: Sequence[Setup], number: int, changes: Iterable[Setup]) -> Iterator[list[Setup]]:
    for change in changes:
        yield [*setups[:number], change, *setups[number + 1 :]]


def _moved(reading: GraphReading, setup: Setup) -> Iterator[Setup]:
    """One cut moved by a few places."""
    index = {place: k for k, place in enumerate(reading.places)}
    for by in (1, -1, 2, -2, 4, -4, 8, -8):
        for stage in range(1, len(setup.starts)):
            at = index.get(setup.starts[stage], -len(index)) + by
            if 0 <= at < len(index):
                moved = (*setup.starts[:stage], reading.places[at], *setup.starts[stage + 1 :])
                if all(a < b for a, b in itertools.pairwise(moved)):
                    yield setup._replace(starts=moved)


def _swapped(setup: Setup) -> Iterator[Setup]:
    for a, b in itertools.combinations(range(len(setup.devices)), 2):
        devices = list(setup.devices)
        devices[a], devices[b] = devices[b], devices[a]
        yield setup._replace(devices=tuple(devices))


def _merged(setup: Setup) -> Iterator[Setup]:
    """Two neighbouring stages on one of their devices."""
    for stage in range(1, len(setup.starts)):
        starts = (*setup.starts[:stage], *setup.starts[stage + 1 :])
        for gone in (stage - 1, stage):
            yield setup._replace(starts=starts, devices=(*setup.devices[:gone], *setup.devices[gone + 1 :]))


def _replaced(setup: Setup, idle: Sequence[str]) -> Iterator[Setup]:
    for device in idle:
        for stage in range(len(setup.devices)):
            yield setup._replace(devices=(*setup.devices[:stage], device, *setup.devices[stage + 1 :]))


def _shared_otherwise(setups: Sequence[Setup]) -> Iterator[list[Setup]]:
    """One micro-batch given from one replica to another."""
    for giver, taker in itertools.permutations(range(len(setups)), 2):
        if setups[giver].micro_batches > 1:
            changed = list(setups)
            changed[giver] = setups[giver]._replace(micro_batches=setups[giver].micro_batches - 1)
            changed[taker] = setups[taker]._replace(micro_batches=setups[taker].micro_batches + 1)
            yield changed


GAP_ROUNDING = 1e-7  # absolute: planners call a gap of rounding errors none
FIRST_WORK = 1e8
MOST_WORK = 2.5e10  # entries of arrays before and after the search; 10^8 to 3 * 10^8 are a second
ROUNDING = 1e-7  # relative: between a bound and the plan that attains it


class PlanCost(NamedTuple):
    step_s: float
    price: float


class _Simple(NamedTuple):
    """Bounds of one problem that need no search."""

    single: float
    several: float


def check_certificate(
    ledger: DifferenceList,
    reading: GraphReading,
    certificate: Certificate | None,
    found: PlanCost,
    setups: Sequence[Setup],
    effort: float,
) -> BoundCheck:
    """Judges every field of the certificate, with this share of the work that a search may be."""
    question, priced = reading.question, _is_priced(reading.question)
    if question.schedule == "zero-bubble":
        ledger.judge("certificate", certificate is None, str(certificate), "none: bounds count each backward whole")
        return BoundCheck(status="none stated", text="the plan states no bound: bounds here count each backward whole")
    if question.schedule == "delayed":
        ledger.judge("certificate", certificate is None, "a bound", "none: of steps that overlap no bound is known")
        return BoundCheck(status="none stated", text="no bound is stated or known of steps that overlap")
    checks = _checks(reading, effort)
    own = min(check.simple for check in checks)
    unit, reached = ("in money" if priced else "s"), (found.price if priced else found.step_s)
    if certificate is None:
        proven = f"at most {reached / own - 1:.2%} above the best of any plan" if own > 0 else "nothing"
        return BoundCheck(
            status="none stated",
            own=own,
            proven=own,
            text=f"the plan states no bound; that of this check, {own:.6g} {unit}, proves {proven}",
        )
    _arithmetic(ledger, question, certificate, reached, priced)
    stated = certificate.lower_bound
    least = own * (1 - ROUNDING)
    ledger.judge("certificate.lower_bound", stated >= least, stated, f"at least {own:.9g}, which takes no search")
    attained = certificate.exact and not _same(reached, stated)
    bests = [check.best(stated, attained=attained) for check in checks]
    known = min([reached, *(best.known for best in bests)])
    expected = f"at most {known:.9g}: some plan {'costs' if priced else 'takes'} no more"
    holds = ledger.judge("certificate.lower_bound", stated <= known * (1 + ROUNDING), stated, expected)
    proven = min([stated, reached, *(best.bound for best in bests)])
    if stated > proven * (1 + ROUNDING):
        if not holds:
            return BoundCheck(status="refuted", own=own, proven=proven, text="refuted by branch and bound")
        if question.constraints.copied:
            text = "not checked: chains that several holders feed are bounded here by those behind one device for all"
            text = f"{text}; {proven:.6g} {unit} is proven"
            return BoundCheck(status="unchecked", proven=proven, text=text)
        return _unchecked(ledger, ClosedForm(reading, priced=priced), stated, setups, proven, unit)
    exact = not certificate.exact or _same(known, stated)
    ledger.judge("certificate.exact", exact, certificate.exact, "false: no plan was found that attains it")
    text = "proven by the bound of this check, which needs no search"
    if any(check.walked for check in checks):
        text = "proven by a relaxation of all plans"
    if any(check.searched for check in checks):
        text = "proven by branch and bound over all plans"
    return BoundCheck(status="proven" if holds else "refuted", own=own, proven=proven, text=text)


def provable(question: Question, stated: float, *, attained: bool, effort: float = 1.0) -> SearchResult:
    """The highest lower bound on any plan, up to one that is stated, that a check proves with this share of its work;
    and what a plan takes that was found at or below the stated one, which is looked for if it is `attained`."""
    checks = _checks(GraphReading(question), effort)
    bests = [check.best(stated, attained=attained) for check in checks]
    searched, simple = min([stated, *(best.bound for best in bests)]), min(check.simple for check in checks)
    known = min(best.known for best in bests)
    return SearchResult(max(searched, simple if simple > stated * (1 + ROUNDING) else 0.0), known)


def _checks(reading: GraphReading, effort: float) -> list[_Check]:
    """One for each number of micro-batches."""
    question, priced = reading.question, _is_priced(reading.question)
    asked = relaxed(question)
    own = reading if asked is question else GraphReading(asked)
    readings = [own if n == asked.micro_batches else GraphReading(asked.cut_into(n)) for n in asked.counts]
    return [_Check(r, priced, effort, exists=not reading.question.constraints.copied) for r in readings]


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= ROUNDING * abs(b)


def _is_priced(question: Question) -> bool:
    fleet = question.fleet
    some = any(d.price_per_hour for d in fleet.devices) or any(site.egress_price_per_gb for site in fleet.region_info)
    return some and question.constraints.objective == "cost"


def _arithmetic(
    ledger: DifferenceList, question: Question, certificate: Certificate, reached: float, priced: bool
) -> None:
    words = question_in_words(
        question.constraints, question.counts, priced=priced, period=question.period, recompute=question.recompute
    )
    ledger.same("certificate.question", certificate.question, words)
    ledger.same("certificate.objective", certificate.objective, "cost" if priced else "step")
    stated = certificate.lower_bound
    if not ledger.judge("certificate.lower_bound", stated > 0, stated, "above 0: nothing proves nothing"):
        return
    most = f"at most the {'price of a step' if priced else 'step time'}, {reached:.9g}"
    ledger.judge("certificate.lower_bound", stated <= reached * (1 + CLOSE), stated, most)
    gap = reached / stated - 1
    ledger.judge("certificate.gap", abs(certificate.gap - gap) <= GAP_ROUNDING, certificate.gap, gap)


def _simple(reading: GraphReading, priced: bool) -> _Simple:
    bounds, holders = Bounds(reading), reading.question.constraints.data_holders
    single, several = (
        (single_price(bounds), several_price(bounds)) if priced else (bounds.single_s(), bounds.several_s())
    )
    alone = len(holders or reading.question.fleet.names) == 1 or reading.not_summed is not None
    return _Simple(single, NEVER if alone else several)


class _Check:
    """The best plan at or below a stated bound, of one number of micro-batches."""

    def __init__(self, reading: GraphReading, priced: bool, effort: float, *, exists: bool) -> None:
        """`exists`: whether the plans that a search finds are plans of the question, and not only below them."""
        self._reading, self._priced, self._effort, self._exists = reading, priced, effort, exists
        self._single, self._several = _simple(reading, priced)
        self.simple = min(self._single, self._several)
        self.walked = self.searched = False  # which of both the bound needed: the relaxation, and the search

    def best(self, stated: float, *, attained: bool) -> SearchResult:
        """Infinite where no plan is at or below the bound, as far as that was to be known: a plan that attains it is
        looked for only where one is claimed. Out of work: what is proven without a search."""
        reach = stated * (1 + ROUNDING if attained else 1 - ROUNDING)
        if self.simple >= reach:
            return SearchResult(NEVER, NEVER)
        single, several = self._single, self._several
        parts = BoundParts(self._reading, Goal(reach)) if walkable(self._reading) and not attained else None
        if parts is not None:
            self.walked = True
            single, several = self._relaxed(parts, reach, FIRST_WORK)
        if min(single, several) >= reach:
            return SearchResult(NEVER, NEVER)
        self.searched, found = True, list[SearchResult]()
        try:
            search = PlanSearch(self._reading, priced=self._priced, effort=self._effort)
            if single < reach:
                found.append(search.single(reach))
            if several < reach:
                found.append(search.several(reach))
        except OutOfWork:
            if parts is not None:
                single, several = self._relaxed(parts, reach, MOST_WORK)
            self.searched = False
            bound = max(self.simple, min(single, several))
            return SearchResult(NEVER if bound >= reach else bound, NEVER)
        known = min((f.known for f in found), default=NEVER) if self._exists else NEVER
        return SearchResult(min((f.bound for f in found), default=NEVER), known)

    def _relaxed(self, parts: BoundParts, reach: float, most: float) -> tuple[float, float]:
        """Bounds on one replica and on several by the relaxation, up to the reach or as far as the work goes."""

        def ended() -> bool:
            return parts.work > most * self._effort

        for part in parts.all:
            part.aim()  # ended after little work, it would go on with a limit that is easier to prove
            while part.bound_s < reach and not part.stuck and not ended():
                part.advance(ended)
        return max(self._single, parts.single.bound_s), max(self._several, parts.several_s)


def _unchecked(
    ledger: DifferenceList, form: ClosedForm, stated: float, setups: Sequence[Setup], proven: float, unit: str
) -> BoundCheck:
    """A plan near the document's may still refute the bound."""
    tried = [form.judged(plan) for plan in near(form.reading, setups)]
    best = min([form.judged(setups), *tried])
    expected = f"at most {best:.9g}: a plan near the document's {'costs' if form.priced else 'takes'} no more"
    holds = ledger.judge("certificate.lower_bound", stated <= best * (1 + ROUNDING), stated, expected)
    text = f"refuted by one of {len(tried)} plans near this one"
    if holds:
        text = f"not checked: to prove it takes more work than this check does; {proven:.6g} {unit} is proven for any "
        text += f"plan, and none of {len(tried)} plans near this one is below what is stated"
    return BoundCheck(status="unchecked" if holds else "refuted", own=None, proven=proven, text=text)
