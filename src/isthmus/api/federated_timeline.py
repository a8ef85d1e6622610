"""The events of a federated job that was simulated with faults, in words, beside the same run without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from isthmus.api.fault_simulation import fault_text
from isthmus.errors import PeerError
from isthmus.programs.rounds import Rounds
from isthmus.simulator.options import Fault
from isthmus.simulator.rounds import FederatedCosts, SimulatedFederation, simulate_federation
from isthmus.units import format_duration

MOST_LINES = 60  # lines of a timeline on a terminal; JSON has all


class FederatedTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Faults, and what came of them."""

    run: SimulatedFederation
    faults: tuple[Fault, ...]
    undisturbed_s: float | None  # all rounds without faults; None where they cannot be finished without them either

    def entries(self) -> list[tuple[float, str]]:
        """Return the events by second of the run."""
        found = [(fault.time_s, fault_text(fault)) for fault in self.faults if fault.time_s <= self.run.seconds]
        found += [(event.time_s, event.text) for event in self.run.events]
        return sorted(found, key=lambda entry: entry[0])

    def lines(self) -> list[str]:
        """Times with what happened, faults that came too late, and how the run ended."""
        happened = [f"{time_s:8.1f} s  {text}" for time_s, text in self.entries()]
        if len(happened) > MOST_LINES:
            happened = [*happened[:MOST_LINES], f"{len(happened) - MOST_LINES} more such lines: see --json"]
        late = [fault_text(fault) for fault in self.faults if fault.time_s > self.run.seconds]
        after = [f"after the end of the run, so without effect: {'; '.join(late)}"] if late else []
        return [*happened, *after, self._conclusion()]

    def _conclusion(self) -> str:
        run = self.run
        hourly = f": {3600 * len(run.rounds) / run.seconds:.3g} rounds/h" if run.seconds else ""
        text = f"{run.finish.outcome} after {len(run.rounds)} rounds in {format_duration(run.seconds)}{hourly}"
        if run.finish.outcome == "done" and self.undisturbed_s is not None:
            text += f"; without faults {format_duration(self.undisturbed_s)}"
        return f"{text}. {run.finish.reason}".rstrip(" .") + "."

    def summary(self) -> dict[str, object]:
        """Return the summary as JSON has it. Times are seconds since the run's beginning."""
        return {
            "outcome": self.run.finish.outcome,
            "reason": self.run.finish.reason,
            "seconds": self.run.seconds,
            "undisturbed_s": self.undisturbed_s,
            "faults": [
                {"time_s": f.time_s, "text": fault_text(f), "after_the_end": f.time_s > self.run.seconds}
                for f in self.faults
            ],
            "events": msgspec.to_builtins(self.run.events),
        }


def simulate_struck(
    make: Callable[[int], Rounds], costs: FederatedCosts, faults: Sequence[Fault], seed: int
) -> FederatedTimeline:
    """The run with these faults, and without. `make`: as `simulate_federation`.

    PeerError for a run that cannot go on though nothing strikes it."""
    run = simulate_federation(make, costs, seed, faults)
    if not faults and run.finish.outcome == "lost":
        raise PeerError(run.finish.reason)
    undisturbed_s: float | None = run.seconds
    if faults:
        other = simulate_federation(make, costs, seed)
        undisturbed_s = None if other.finish.outcome == "lost" else other.seconds
    return FederatedTimeline(run=run, faults=tuple(faults), undisturbed_s=undisturbed_s)
