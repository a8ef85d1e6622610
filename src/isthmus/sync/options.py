"""Options of `attach` besides the mode and the period."""

from __future__ import annotations

import math

import msgspec

from isthmus.combinations import refused
from isthmus.cost import Decoupled
from isthmus.errors import UserError, check_choice, plain_types
from isthmus.plans.exchanges import DELAY, MIXING, MOMENTUM, RATE
from isthmus.plans.sync import MODES_OF, SyncPlan


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choices of `attach`, the same on every worker but for `weight`. Raises UserError for a value out of range.

    `attach` refuses an option other than its default that its mode does not read (`MODES_OF`)."""

    weight: float = 1.0
    """This worker's share in every average, relative to the others': samples or tokens that it sees per step.
    `decoupled`: their number."""
    balance: bool = False
    """`local` and `outer`: from the third period on every worker makes steps of its own number, by its speed in the
    last five, and has a share in the average to match. Loop while `sync.periods` is below a number: steps differ."""
    average_state: bool = False
    """Average the optimizer's state as well, and make an averaged step as S-SGD would: gradients, parameters and
    state are averaged, then updated. Modes `local`, `partial`, `dream`, `dreamddp` and `outer`."""
    smallest_layer_bytes: int = 65536
    """Smaller modules are averaged together with the one before: a message costs its latency, however short."""
    bucket_bytes: int = 1 << 20
    """`every-step`, and `asc-wfbp` without a plan: gradients travel in messages of at least this size, but for the
    last."""
    overlap: bool = False
    """`partial`: update inside backward and average at once, as `dream` does and with its restrictions."""
    forward_overlap: bool = False
    """`dream`, `dreamddp`, and `partial` with `overlap`: averages may reach into the next forward, where each layer
    waits for its own. Between `sync.step()` and the forward, call `sync.wait()` before parameters are read or written
    in another way than by a forward or a state dict: what is on the way is in pieces. Not with `average_state`,
    whose updates wait for the averages."""
    spare: float | None = None
    """`dream`, `dreamddp`: share of the computation that fillings leave free: 1 for no fillings, 0 to average layers
    once more wherever the wire would be idle. That brings workers nearer to each other, but keeps processors and links
    busy. None: 1 for `dream`, 0 for `dreamddp`."""
    warm_up_steps: int = 4
    """`dream`, `dreamddp`, `asc-wfbp`: steps that are measured before the first plan. The first is thrown away."""
    drift: float | None = None
    """`dream`, `dreamddp`: plan again when the link's time changes by more than this share, and that is not a mere
    flicker. None: 0.2 for `dream`, never for `dreamddp`."""
    planner: str | None = None
    """`dream`, `dreamddp`: a sync planner by name. None: `dream-spread`, which begins with `dream`'s exact schedule in
    intervals, and stays with it where nothing else can hide more; for `dreamddp` the paper's search, `dream-dfs`."""
    at_once: int = 2  # `asc-wfbp`: messages that may be on their way together, at most
    plan: SyncPlan | None = None
    """`dream`, `dreamddp`: a plan made earlier for this model, which is kept: nothing is measured or planned."""
    outer_rate: float = RATE
    outer_momentum: float = MOMENTUM
    """`outer` and `streaming`: Nesterov SGD on the averaged deltas. The defaults are DiLoCo's."""
    error_decay: float = 1.0
    """`outer` and `streaming` with a codec: share of what a payload leaves out that later ones bring."""
    fragments: int = 0  # `streaming`: parts of the model that take turns; 0 for one per step of the period
    delay: int = DELAY  # `streaming`: steps between the start of a fragment's exchange and its use (tau)
    mixing: float = MIXING  # `streaming`: share of the local parameters that stays when the others' arrive (alpha)
    decoupled: Decoupled = Decoupled()
    """`decoupled`: fragments, quorum, grace, outer step and codec, as in a job file's `[sync.decoupled]`."""
    steps: int = 0
    """`decoupled`: the run is over (`Sync.finished`) when all workers together have trained on as much as if each had
    made so many steps. 0: when each that is there has called `Sync.close`."""
    timeout_s: float = 60.0
    """`decoupled`: a silent connection is given up after so long, and a merger without workers ends."""
    record: str | None = None
    """`decoupled`: folder on worker 0's machine, in which a new `merges.jsonl` gets every merge."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            check_choice(f"sync option {field.name!r}:", value, field.type)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as wrong:
                raise UserError(f"sync option {field.name!r}: got {value!r}: {plain_types(str(wrong))}") from None
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"sync option {field.name!r}: got {value}, expected a finite number")
        at_least: dict[str, float] = {
            "smallest_layer_bytes": 0,
            "bucket_bytes": 1,
            "warm_up_steps": 2,
            "drift": 0,
            "outer_rate": 0,
            "outer_momentum": 0,
            "error_decay": 0,
            "fragments": 0,
            "delay": 0,
            "mixing": 0,
            "spare": 0,
            "at_once": 1,
            "steps": 0,
            "timeout_s": 1,
        }
        for field, least in at_least.items():
            if (value := getattr(self, field)) is not None and not value >= least:
                raise UserError(f"sync option {field!r}: got {getattr(self, field)}, expected at least {least}")
        for field in ("spare", "error_decay"):
            if (value := getattr(self, field)) is not None and value > 1:
                raise UserError(f"sync option {field!r}: got {getattr(self, field)}, expected at most 1")
        for field in ("outer_momentum", "mixing"):
            if getattr(self, field) >= 1:
                raise UserError(f"sync option {field!r}: got {getattr(self, field)}, expected less than 1")
        if not self.weight > 0:
            raise UserError(f"sync option 'weight': got {self.weight}, expected a number above 0")
        try:  # a struct that was made in Python is not checked yet
            decoupled = msgspec.convert(msgspec.to_builtins(self.decoupled), Decoupled)
        except msgspec.ValidationError as wrong:
            raise UserError(f"sync option 'decoupled': {plain_types(str(wrong))}") from None
        for field, of_jobs in (("replicas", "devices"), ("packed", ())):
            if (value := getattr(decoupled, field)) != of_jobs:
                raise UserError(f"sync option 'decoupled': {field}: got {value!r}, which is for job files")

    def check_read(self, mode: str, *, codec: bool) -> None:
        """UserError for an option that is set and that this mode does not read. `codec`: whether there is one."""
        given = {
            f.name: repr(getattr(self, f.name))
            for f in msgspec.structs.fields(self)
            if getattr(self, f.name) != f.default
        }
        if "plan" in given:
            given["plan"] = "a plan"
        if mode == "decoupled" and self.weight % 1:
            raise UserError(
                f"sync option 'weight': got {self.weight} with mode 'decoupled', expected the samples of a step, in "
                "whole numbers"
            )
        for field, value in given.items():
            modes = MODES_OF.get(field, (mode,))
            if mode not in modes:
                got, of = f"{value} with mode {mode!r},", f"it is for mode {' or '.join(map(repr, modes))}"
                raise refused("an option of another mode", "a mode", got, f"sync option {field!r}", of)
        needed = [
            ("forward_overlap", "overlap=True", mode != "partial" or self.overlap),
            ("forward_overlap", "average_state=False", not self.average_state),
            ("error_decay", "a codec", codec),
            *((field, "no plan", self.plan is None) for field in ("spare", "warm_up_steps", "drift", "planner")),
        ]
        for field, what, there in needed:
            if field in given and not there:
                raise UserError(f"sync option {field!r}: got {given[field]}, expected {what} with it")
