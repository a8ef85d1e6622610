"""The proof of a plan: a lower bound on the step of any plan of the job, or on its price, by `verification`.

Planners prove nothing of it, and share no code with what does. A decision is the same for who states a bound and for
who checks it: what `isthmus plan` writes, `isthmus plan --verify` accepts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from isthmus.api.observer import Observer, Silent
from isthmus.cost import Problem, step_price
from isthmus.planners import cut_short
from isthmus.plans import Certificate, Plan
from isthmus.units import format_duration
from isthmus.verification import ProofProgress, Prover, Question, StateBytes, asked_in_words, is_priced, unproven

ROUNDING = 1e-7  # relative: a bound that is so close to a plan's step is attained
PLANNING_WORK = 3e7  # entries of arrays that decisions may fill while planning; a second has two to four times 10^7
PROVING_WORK = 1e11


class Proving(NamedTuple):
    """The time for which a bound is raised, and who gets a line for each gain."""

    seconds: float | None = None  # None: a little work, the same on every machine
    observer: Observer = Silent()

    def bound(self, question: Question, reached: float) -> float:
        """The highest that is proven of what any plan takes, up to what a known plan does."""
        start_s, seconds = time.monotonic(), self.seconds

        def tell(progress: ProofProgress) -> None:
            if seconds is not None:
                gap, spent = f"{reached / progress.bound - 1:.1%}", format_duration(time.monotonic() - start_s)
                found = f"at most {gap} above the best possible plan after {spent}"
                self.observer.note(f"{found}; distinguished: {progress.distinguished}")

        def ended() -> bool:
            return cut_short() or (seconds is not None and time.monotonic() - start_s > seconds)

        prover = Prover(question, priced=is_priced(question))
        return prover.run(reached, PLANNING_WORK if seconds is None else PROVING_WORK, ended, tell)


A_LITTLE = Proving()


def with_bound(problem: Problem, plan: Plan, counts: Sequence[int], proving: Proving = A_LITTLE) -> Plan:
    """The plan, which has a simulated step, with what is proven over these numbers of micro-batches; without a
    certificate where nothing is, with a note where no proof is known."""
    question = question_of(problem, counts)
    reason = unproven(question)
    if reason is not None:
        return msgspec.structs.replace(plan, certificate=None, notes=(*plan.notes, reason))
    reached = reached_by(question, problem, plan)
    bound = proving.bound(question, reached) if reached else 0.0
    return msgspec.structs.replace(plan, certificate=certificate_of(question, reached, bound))


def reached_by(question: Question, problem: Problem, plan: Plan) -> float:
    """Seconds of a simulated step, or its price where that is bounded; 0 where it was not simulated."""
    steady_s = plan.predicted.steady_s
    return step_price(plan, problem.fleet, steady_s).total if steady_s and is_priced(question) else steady_s


def certificate_of(question: Question, reached: float, bound: float) -> Certificate | None:
    """None for a bound of 0, which proves nothing."""
    if bound <= 0:
        return None
    exact = bound >= reached * (1 - ROUNDING)
    bound = reached if exact else bound
    return Certificate(
        lower_bound=bound,
        gap=reached / bound - 1,
        objective="cost" if is_priced(question) else "step",
        question=asked_in_words(question),
        exact=exact,
    )


def question_of(problem: Problem, counts: Sequence[int]) -> Question:
    """The problem in the words of the check."""
    state = problem.state
    return Question(
        graph=problem.flow.graph,
        fleet=problem.fleet,
        micro_batch_size=problem.micro_batch_size,
        micro_batches=problem.micro_batches,
        schedule=problem.schedule,
        period=problem.sync.every,
        state=StateBytes(master=state.master_bytes, gradient=state.gradient_bytes, optimizer=state.optimizer_bytes),
        constraints=problem.constraints,
        recompute=problem.recompute,
        counts=tuple(counts),
        gradients=problem.sync.mode == "every-step",
    )
