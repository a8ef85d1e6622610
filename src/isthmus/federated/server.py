"""The server's side of an algorithm: its values, the sums that come in, and what is kept of a run on disk.

    rounds/
      round-000012.safetensors    the server's values after round 12, which is each client's state, and what a resumed
                                  run must agree with in the file's metadata, with a digest of it all

A file is written beside and renamed, so it is there whole or not at all. Two are kept: where a disk damaged the last
one, a run goes on from the one before, unless clients keep states, whose places may be written over by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isthmus.atomic_write import atomic_path
from isthmus.combinations import refused
from isthmus.data.dataset import fingerprint_of
from isthmus.documents import differences
from isthmus.errors import Diverged, UserError, users_code
from isthmus.federated.admission import (
    AdmissionRules,
    Form,
    admit,
    check_largest,
    first_state,
    forms_of,
    named_tensors,
    unwritten,
)
from isthmus.federated.algorithms import BUFFERS, Algorithm, ClientUpdate, Combine, Values
from isthmus.federated.algorithms.algorithm import Wrapping, changes_of
from isthmus.federated.partial import UNIT, PartialSum
from isthmus.federated.resident import as_values, buffers_of, is_buffer, moved
from isthmus.protocol.federated_messages import PhaseId, PhaseSetup
from isthmus.reading import parse_json
from isthmus.run_files import newest_whole
from isthmus.training.finite import is_finite

_BEFORE = "before-"


def with_stale_models(now: Mapping[str, Tensor], past: Sequence[Mapping[str, Tensor]]) -> Values:
    """Return the broadcast and `past`, those of one round before, of two, and so on, as one."""
    found = dict(now)
    for late, values in enumerate(past, 1):
        found |= {f"{_BEFORE}{late}/{name}": value for name, value in values.items()}
    return found


def without_stale_models(values: Mapping[str, Tensor]) -> tuple[Values, list[Values]]:
    """The two that `with_stale_models` was given."""
    now: Values = {}
    past: dict[int, Values] = {}
    for key, value in values.items():
        late, _, name = key.removeprefix(_BEFORE).partition("/")
        if key.startswith(_BEFORE) and late.isdecimal():
            past.setdefault(int(late), {})[name] = value
        else:
            now[key] = value
    return now, [past[late] for late in sorted(past)]


def staleness_weight(update: ClientUpdate, late: int, *, rows: bool = False) -> ClientUpdate:
    """FedBuff's s(tau) = 1 / sqrt(1 + tau), on the values: they count among the others, for less. Single numbers beside
    a change (FedNova's steps, a loss) stay, as they say how large it is to be taken: it would be scaled twice. Changes
    of buffers are scaled as those of the model. With `rows` the first dim of values is of clients."""
    if not late:
        return update
    share = 1 / math.sqrt(1 + late)
    changes = changes_of(update.values, int(rows))
    values = {
        name: value * share if name in changes or is_buffer(name) else value for name, value in update.values.items()
    }
    return ClientUpdate(values=values, state=update.state, weight=update.weight)


STATES = "states"
_SERVER = "server/"
_RUN, _SHA256 = "run", "sha256"
_RUNNING_MEAN = "running_mean"  # the name that torch's layers give theirs
KEPT = 2
COMBINING = ("federated.aggregation", "privacy", "federated.admission")
"""The tables of a job that change how updates are combined; `RunIdentity.combining` is their JSON, in this order."""


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a resumed run must share with the run before."""

    algorithm: str
    options: dict[str, object]
    model: str
    local: str
    numbers: int  # in the model's vector
    data: str
    seed: int
    clients: int
    combining: str = ""
    participation: str = ""  # the part of a private run's participation that its epsilon assumes


class Server:
    """Values, sums of the open phase, and commits. The driver calls it in the order that the coordinator says."""

    def __init__(
        self, algorithm: Algorithm, model: Tensor, buffers: Mapping[str, Tensor], population: int, past: int = 0
    ) -> None:
        """`buffers` are the module's, by name. `past` is for how many rounds what was broadcast is needed again."""
        with users_code("algorithm: init_server"):
            first = _checked(algorithm.init_server(model), "init_server", Form.of(model))
        self.values: Values = {name: value.clone() for name, value in first.items()}
        self._algorithm = algorithm
        self._passes = algorithm.passes
        self._adds_noise = isinstance(algorithm, Wrapping) and algorithm.adds_noise
        self._population = population
        self._most_past = past
        self._faint: set[str] = set()
        self.notices: list[str] = []  # lines for the run's log that are not there yet
        self._past: list[Values] = []  # broadcasts of a round before, two rounds before, and so on
        self.phase: PhaseId | None = None
        self.keeps = first_state(algorithm, self.values["model"]) is not None
        """Whether clients keep something from round to round."""
        averaged = not isinstance(algorithm, Wrapping)
        if not averaged and any(name.rpartition(".")[2] == _RUNNING_MEAN for name in buffers):
            raise refused("running statistics", "privacy or aggregation", "some")
        self._first_buffers = as_values(buffers)
        self.values |= self._first_buffers
        with users_code("algorithm"):
            self.forms = forms_of(algorithm, self.values if averaged else first)
        """The forms of clients' values by pass."""
        self._partials = [
            PartialSum(
                self._returns(number), {name: math.prod(form.shape) for name, form in self.forms[number].items()}
            )
            for number in range(len(self._passes))
        ]

    def _returns(self, number: int) -> Mapping[str, Combine]:
        returns = self._passes[number].returns
        changes = {name for name in self.forms[number] if is_buffer(name)}
        return {**returns, **dict.fromkeys(changes, "weighted_mean")}

    @property
    def partial(self) -> PartialSum:
        """The sums of the open phase. What is merged must not change until `settle` or `absorb`; what is folded was
        admitted."""
        assert self.phase is not None, "a phase is open"
        return self._partials[self.phase.number]

    def open(self, opening: PhaseSetup) -> None:
        """A phase begins: sums of another one are dropped."""
        if opening.phase == self.phase:
            return
        self.phase = opening.phase
        self.partial.begin(opening.samples, opening.clients)

    @property
    def passes(self) -> int:
        """A round."""
        return len(self._passes)

    @property
    def kept(self) -> Values:
        """All that another server needs to go on from here: of the model's buffers those that have changed."""
        return with_stale_models({**self._known, **self._changed_buffers}, self._past)

    def restore(self, kept: Values, rounds: int) -> None:
        """Go on from what another one kept after so many rounds. UserError where it kept too little."""
        values, past = without_stale_models(kept)
        if unknown := buffers_of(values).keys() - buffers_of(self._first_buffers).keys():
            raise UserError(f"model: the run began with a buffer {min(unknown)!r}, expected the same buffers")
        self.values = {**self._first_buffers, **values}
        if len(past) < min(self._most_past, rounds):
            what = f"federated.participation.staleness: got {self._most_past}"
            raise UserError(f"{what}, expected at most {len(past)}, with which the run began")
        self._past = past[: self._most_past]

    def broadcast(self) -> Values:
        """Return the values that every executor receives, once a phase."""
        return with_stale_models(self._broadcast_values(), self._past)

    def _broadcast_values(self) -> Values:
        with users_code("algorithm: broadcast"):
            broadcast = _tensors(self._algorithm.broadcast(self._known), "broadcast")
        if self.keeps and "model" not in broadcast:
            raise UserError("algorithm: broadcast gives no 'model', expected one: init_client is given it")
        return {**broadcast, **self._changed_buffers}

    @property
    def largest_broadcast(self) -> Values:
        """Return the same as `broadcast` when every buffer has changed."""
        return {**self.broadcast(), **self._buffers}

    @property
    def _known(self) -> Values:
        """The algorithm's values."""
        return {name: value for name, value in self.values.items() if not is_buffer(name)}

    @property
    def _buffers(self) -> Values:
        return {name: value for name, value in self.values.items() if is_buffer(name)}

    @property
    def _changed_buffers(self) -> Values:
        """Clients have the first ones."""
        first = self._first_buffers
        return {name: value for name, value in self._buffers.items() if not _same(value, first[name])}

    def settle(self) -> None:
        """Read the sums that were merged."""
        if self.phase is not None:
            self.partial.settle()

    @property
    def numbers(self) -> int:
        """Return how many numbers of an update are added up, without buffers, in the pass that has most."""
        return max(sum(math.prod(f.shape) for name, f in forms.items() if not is_buffer(name)) for forms in self.sums)

    @property
    def sums(self) -> list[dict[str, Form]]:
        """Return the forms of the values that are added up, by pass."""
        return [
            {name: form for name, form in forms.items() if self._returns(number).get(name) != "collect"}
            for number, forms in enumerate(self.forms)
        ]

    def admit(
        self, update: ClientUpdate, samples: int, rules: AdmissionRules, steps: int | None = None
    ) -> ClientUpdate:
        """The update of a client of the open phase, clipped where the rules say so. PeerError for one that is refused:
        whatever is returned can be folded in. `steps` are those that the client was asked for."""
        assert self.phase is not None, "a phase is open"
        admitted = admit(update, self.forms[self.phase.number], rules, self._algorithm.change)
        if steps is not None:
            check_largest(admitted, self._algorithm.largest(steps), steps)
        self.partial.check_update(admitted, samples)
        return admitted

    def absorb(self) -> None:
        """All sums of the pass are in; `notices` has lines about them. With no client's update values stay, but for
        noise that epsilon counts on. UserError when the algorithm's step fails, Diverged when it leaves what is not
        finite."""
        assert self.phase is not None, "a phase is open"
        if not self.partial.clients and not self._adds_noise:
            return  # nobody was drawn
        self._notice_faint(self.phase)
        combined = self.partial.combined(self.values["model"].dtype)
        cohort = self.partial.cohort(self._population)
        returns = self._returns(self.phase.number)
        for name, form in self.forms[self.phase.number].items():
            if name in combined and returns.get(name, "collect") != "collect":
                combined[name] = combined[name].view(form.shape)
        changes = {name: combined.pop(name) for name in [*combined] if is_buffer(name)}
        known = self._known
        if self._most_past:
            self._past = [self._broadcast_values(), *self._past][: self._most_past]
        with users_code(f"algorithm: server, round {self.phase.round + 1}"):
            with unwritten(known, "server", "was given", "a new tensor"):  # they may still be saved, and evaluated
                after = self._passes[self.phase.number].server(dict(known), combined, cohort)
            after = _checked(after, "server", Form.of(self.values["model"]))
        buffers = {n: moved(v, changes[n]) if n in changes else v for n, v in self._buffers.items()}
        self.values = {**after, **buffers}
        for name, value in after.items():
            if not is_finite(value):
                what = f"round {self.phase.round + 1}: the server's {name!r} is not finite any more"
                raise Diverged(f"{what}: try a smaller learning rate")

    def _notice_faint(self, phase: PhaseId) -> None:
        """Once of each value."""
        forms, model = self.forms[phase.number], self.values["model"].shape
        for name, size in self.partial.faint().items():
            if forms[name].shape == model and name not in self._faint:
                self._faint.add(name)
                what = f"round {phase.round + 1}: {name!r} of all clients is within {size:.2g} of 0, and exact sums"
                lost = "digits are lost, and what is below half a unit counts as 0"
                hint = "raise learning_rate, or scale the loss up"
                self.notices.append(f"{what} count in units of {UNIT:.2g}: {lost}: {hint}")


def _tensors(values: Values, by: str) -> Values:
    """Check the result of the algorithm's function `by`, beside which the model's buffers have a place."""
    for name in named_tensors(values, by):
        if name == BUFFERS or is_buffer(name):
            raise UserError(f"algorithm: {by} gives {name!r}, a name of the model's running means: expected another")
    return values


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether their bits are equal."""
    return a is b or torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _checked(values: Values, by: str, model: Form) -> Values:
    """The server's values that the algorithm's function `by` gave. UserError for what goes on being no model."""
    if "model" not in _tensors(values, by):
        raise UserError(f"algorithm: {by} gives no 'model', expected one among the server's values")
    if (got := Form.of(values["model"])) != model:
        raise UserError(f"algorithm: {by} gives 'model': got {got}, expected {model}")
    return values


class Committed(NamedTuple):
    """A round on disk."""

    round: int
    values: Values
    states: NDArray[np.int32] | None
    """(population,) which is each client's state, of algorithms whose clients keep something."""


class _DamagedError(UserError):
    """A file that is not as it was saved."""


class Commits:
    """The committed rounds of a run on disk."""

    def __init__(self, folder: Path, identity: RunIdentity | None = None) -> None:
        """Without an `identity`, whatever run they are of: to be read only."""
        self._folder = folder
        self._identity = identity

    def save(self, round_: int, values: Mapping[str, Tensor], states: NDArray[np.int32] | None) -> Path:
        """Make a round durable: a killed process does not lose it, a machine without power may. UserError when it
        cannot be written."""
        tensors = {_SERVER + name: value for name, value in _apart(values).items()}
        if states is not None:
            tensors[STATES] = torch.from_numpy(states)
        assert self._identity is not None, "whose rounds they are"
        run = msgspec.json.encode(self._identity).decode()
        metadata = {_RUN: run, _SHA256: _digest(run, round_, tensors)}
        path = self.path(round_)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(path, durable=False) as new:
                save_file(tensors, new, metadata=metadata)
            for old in self._files()[:-KEPT]:
                old.unlink()
        except (OSError, SafetensorError) as e:
            raise UserError(f"round file {path}: cannot be written: {e}") from None
        return path

    def path(self, round_: int) -> Path:
        return self._folder / f"round-{round_:06d}.safetensors"

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("round-*.safetensors"))

    def newest_file(self) -> Path | None:
        """Return the file of the last round there is, whole or not."""
        return max(self._files(), default=None)

    def rounds(self) -> int:
        """Return how many were made by the time of the last file there is, whole or not."""
        numbers = [path.stem.removeprefix("round-") for path in self._files()]
        return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)

    def newest(
        self, passed_over: Callable[[str], None] = lambda _: None, *, needs_states: bool = True
    ) -> Committed | None:
        """The last committed round that is as it was saved; None before the first. `passed_over` gets the reason of
        each newer one. Only who goes on from it `needs_states` of clients.

        UserError for a file of another run; and where none is whole, or where one that is whole needs states that may
        have been written over: to begin anew is for the user to say.
        """
        damaged: list[str] = []

        def pass_over(why: str) -> None:
            damaged.append(why)
            passed_over(why)

        found = newest_whole(reversed(self._files()), self._read, pass_over, _DamagedError)
        if needs_states and damaged and found is not None and found.states is not None:
            what = f"round {found.round + 1} cannot be gone back to, as its clients' states may be written over"
            raise UserError(f"{damaged[0]}; {what}")
        return found

    def _read(self, path: Path) -> Committed:
        try:
            with safe_open(path, framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        except (OSError, SafetensorError) as e:
            raise _DamagedError(f"round file {path}: cannot be read: {e}") from None
        run, number = metadata.get(_RUN, ""), path.stem.removeprefix("round-")
        if not number.isdecimal() or metadata.get(_SHA256) != _digest(run, int(number), tensors):
            raise _DamagedError(f"round file {path}: is not as it was saved: altered since")
        self._check(path, run)
        states = tensors.pop(STATES, None)
        values = {name.removeprefix(_SERVER): value for name, value in tensors.items()}
        return Committed(int(number), values, None if states is None else states.numpy().copy())

    def _check(self, path: Path, run: str) -> None:
        try:
            saved = parse_json(run, RunIdentity, "")
        except UserError:
            raise UserError(f"round file {path}: does not say which run it is of") from None
        if self._identity is None:
            return
        for field in self._identity.__struct_fields__:
            got, expected = getattr(saved, field), getattr(self._identity, field)
            if got != expected:
                top = "" if field in ("combining", "local") else field
                what = next(differences(_document(got), _document(expected), top))
                raise UserError(f"{path.parent.parent}: is of another job: {what}")


def _document(value: object) -> object:
    """The value, or the object of which it is the JSON text."""
    try:
        found = parse_json(value, object, "") if isinstance(value, str) and value[:1] in ("{", "[") else value
    except UserError:
        return value
    if isinstance(found, dict) and "epochs" in found:  # `RunIdentity.local`, by the tables of a job
        steps = cast("dict[str, object]", found)
        return {name: steps.pop(name) for name in ("learning_rate", "optimizer") if name in steps} | {"training": steps}
    return dict(zip(COMBINING, found, strict=False)) if isinstance(found, list) else found


def _digest(run: str, round_: int, tensors: Mapping[str, Tensor]) -> str:
    """Digest everything in a round's file."""
    named = sorted(tensors.items())
    shapes = [(name, str(value.dtype), list(value.shape)) for name, value in named]
    memory = (value.reshape(-1).view(torch.uint8).numpy() for _, value in named)
    return fingerprint_of({"run": run, "round": round_, "tensors": shapes}, memory)


def _apart(values: Mapping[str, Tensor]) -> Values:
    """Each in memory of its own, as files hold them: an algorithm may give one tensor under two names."""
    found: Values = {}
    known: set[int] = set()
    for name, value in values.items():
        memory = value.untyped_storage().data_ptr()
        found[name] = value.clone(memory_format=torch.contiguous_format) if memory in known else value.contiguous()
        known.add(memory)
    return found
