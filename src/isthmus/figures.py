"""The numbers of a step: an optimizer step, a federated round. Each is declared here and given where it is measured.
The terminal, notebooks, trackers, callbacks, the run's record and the page show it by its declaration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.units import format_duration, format_size

Kind = Literal["loss", "time", "bytes", "count", "number"]


class Figure(msgspec.Struct, frozen=True):
    """How a number is shown."""

    label: str  # in a table or above a curve
    text: str = ""  # in a sentence, with `{}` for the value; without it sentences leave it out
    kind: Kind = "number"

    def said(self, value: float) -> str:
        """Empty where there is nothing to say, as of none refused."""
        if not self.text or (not value and self.kind in ("count", "bytes")):
            return ""
        match self.kind:
            case "loss":
                shown = f"{value:.4f}"
            case "time":
                shown = format_duration(value)
            case "bytes":
                shown = format_size(value)
            case "count":
                shown = f"{value:,.0f}"
            case "number":
                shown = f"{value:,.0f}" if value >= 1000 else f"{value:,.3g}"
        return self.text.format(shown)


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """None of what a program does not have."""

    loss: float | None = None
    """Mean training loss of the step's batch; None when no device reported one, and of a round."""
    clients: int | None = None  # Clients of a round whose updates were accepted.
    refused: int | None = None  # Updates of a round that were not accepted.
    late: int | None = None
    """Updates that were made for a round before; or contributions of decoupled replicas that came after their merge, so
    far."""
    missing: int | None = None  # Clients of a round that did not answer.
    reassigned: int | None = None  # Clients of a round that another executor took over.
    merges: int | None = None  # Merges of decoupled replicas so far.
    step_s: float | None = None
    """Seconds of a step, as a mean over the last 16; None before a second step. Of a round: its own."""
    longest_s: float | None = None  # Seconds of the executor that trained longest in a round.
    planned_s: float | None = None  # The same as it was planned; None while nothing was known of the executors.
    tokens_per_s: float | None = None  # Speed on text; None before a second step.
    samples_per_s: float | None = None  # Speed on other data; None before a second step.
    sent_bytes: int = 0  # Bytes of all links together.


FIGURES: Mapping[str, Figure] = {  # figures by the name of the field, in the order of a sentence
    "loss": Figure("loss", "loss {}", "loss"),
    "clients": Figure("clients", "{} clients", "count"),
    "refused": Figure("refused", "{} refused", "count"),
    "late": Figure("late", "{} late", "count"),
    "missing": Figure("missing", "{} missing", "count"),
    "reassigned": Figure("reassigned", kind="count"),
    "merges": Figure("merges", "{} merges", "count"),
    "step_s": Figure("step time", "{}", "time"),
    "longest_s": Figure("longest executor", kind="time"),
    "planned_s": Figure("longest executor, planned", kind="time"),
    "tokens_per_s": Figure("tokens/s", "{} tokens/s"),
    "samples_per_s": Figure("samples/s", "{} samples/s"),
    "sent_bytes": Figure("bytes over links", "{} over links", "bytes"),
}


def figures_of(step: StepFigures) -> dict[str, float]:
    found: dict[str, float | None] = {name: getattr(step, name) for name in FIGURES}
    return {name: float(value) for name, value in found.items() if value is not None}


def figures_text(figures: Mapping[str, float]) -> list[str]:
    said = (figure.said(figures[name]) for name, figure in FIGURES.items() if name in figures)
    return [text for text in said if text]
