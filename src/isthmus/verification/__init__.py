"""A second opinion on a plan document: every figure computed again, with no code of the planners or the cost model.

What these share with the rest is the words: graphs, fleets and plans as they are written down. Two programs that were
written apart seldom make the same mistake, so a plan that passes is right, or wrong in the definitions.
"""

from isthmus.verification.certificate import Until, asked_in_words, is_priced
from isthmus.verification.check import verify
from isthmus.verification.prover import ProofProgress, Prover, unproven
from isthmus.verification.question import BoundCheck, Difference, Question, StateBytes, Verdict, state_bytes

__all__ = [
    "BoundCheck",
    "Difference",
    "ProofProgress",
    "Prover",
    "Question",
    "StateBytes",
    "Until",
    "Verdict",
    "asked_in_words",
    "is_priced",
    "state_bytes",
    "unproven",
    "verify",
]
