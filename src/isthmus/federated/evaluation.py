"""How good a model is: on held-out samples, and on the clients' own data, one client at a time;
of the models that clients use themselves, where each keeps part of it, or all of it, as its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
from numpy import int32
from numpy.typing import NDArray
from torch import Tensor

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import all_to_device
from isthmus.data import DataSpec, load_dataset
from isthmus.data.clients import ClientData
from isthmus.data.dataset import NothingHeldOut, evaluation_rows
from isthmus.data.femnist import FemnistShaped
from isthmus.errors import UserError, users_code
from isthmus.federated.admission import Form, first_state
from isthmus.federated.algorithms import Algorithm, Values
from isthmus.federated.job import FEMNIST, FederatedJob, accelerator_of, build, client_data
from isthmus.federated.resident import Resident
from isthmus.federated.states import StateLost, States
from isthmus.graph.metrics import NO_METRICS, Metrics
from isthmus.graph.outputs import evaluate, loss_and_count
from isthmus.programs.open_phase import RoundRecord
from isthmus.protocol.federated_messages import NONE
from isthmus.run_files import ROUND_LINES, LinesFile
from isthmus.sanitize import sanitize


def is_personal(algorithm: Algorithm, model: Tensor) -> bool:
    """Return whether clients use models of their own. UserError for one that is no model."""
    first = first_state(algorithm, model)
    return first is not None and _own(algorithm, model, first) is not None


class OwnModels:
    """Reads clients' states, beside those who write them. A client whose state is lost has the model with which it will
    begin anew, where the algorithm allows that."""

    def __init__(self, algorithm: Algorithm, states: States) -> None:
        self._algorithm = algorithm
        self._states = states
        self._lost: set[tuple[int, int]] = set()  # clients and places of which that was said

    def after(self, model: Tensor, places: NDArray[int32], log: Callable[[str], None]) -> Callable[[int], Tensor]:
        """Each client's, [P], after a round that left the server this model and the clients' states in these places.
        `log` is called once of a state that is lost; UserError where the algorithm cannot do without it."""

        def of(client: int) -> Tensor:
            place = int(places[client])
            kept = None if place == NONE else self._read(client, place, log)
            state = first_state(self._algorithm, model) if kept is None else kept
            own = None if state is None else _own(self._algorithm, model, state)
            return model if own is None else own

        return of

    def _read(self, client: int, place: int, log: Callable[[str], None]) -> Values | None:
        """None where it is lost."""
        try:
            return {name: value[0] for name, value in self._states.read([client], [place]).items()}
        except StateLost as lost:
            if not self._algorithm.state_can_be_lost:
                raise lost.refusal() from None
            if (client, place) not in self._lost:
                self._lost.add((client, place))
                log(f"{lost}; client {client} is evaluated with a new one")
            return None


def _own(algorithm: Algorithm, model: Tensor, state: Values) -> Tensor | None:
    with users_code("algorithm: own_model"):
        own = algorithm.own_model(model, state)
    if own is not None and Form.of(own) != Form.of(model):
        raise UserError(f"algorithm: own_model gives {Form.of(own)}, expected {Form.of(model)}")
    return own


BATCH = 256


class ClientFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One figure (the loss or a metric) of clients or sites, each on its own data."""

    clients: int  # that have it
    mean: float
    worst_decile: float  # mean of the worst tenth: of the lowest, or of a loss or perplexity the highest
    deviation: float
    each: dict[str, float]  # each figure by client's number or site's name


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The model's evaluation after a round."""

    loss: float | None  # on held-out samples; None where there are none
    metrics: dict[str, float | None] = {}  # the job's metrics on held-out samples; None of one that counted nothing
    clients: dict[str, ClientFigures] = {}
    """`loss` and the job's metrics, where clients were evaluated. Of sites: what they reported, of the model that the
    round began with."""


def client_figures(
    found: Mapping[str, Mapping[str, float | None]], lower_is_better: Collection[str]
) -> dict[str, ClientFigures]:
    """Summarize figures by name, from each client's. Sites choose the names, and a terminal shows them."""
    names = dict.fromkeys(name for figures in found.values() for name in figures)
    made: dict[str, ClientFigures] = {}
    for name in names:
        each = {who: v for who, figures in found.items() if (v := figures.get(name)) is not None and math.isfinite(v)}
        if not each:
            continue
        # By a power of two below 1, so that no sum or square overflows: JSON has no word for what is not finite.
        exponent = math.frexp(max(map(abs, each.values())))[1]
        ascending = np.sort([math.ldexp(value, -exponent) for value in each.values()])
        count = max(1, len(each) // 10)
        worst = ascending[-count:] if name in lower_is_better else ascending[:count]
        made[sanitize(name)] = ClientFigures(
            clients=len(each),
            mean=math.ldexp(float(ascending.mean()), exponent),
            worst_decile=math.ldexp(float(worst.mean()), exponent),
            deviation=math.ldexp(float(ascending.std()), exponent),
            each=each,
        )
    return made


class Evaluator:
    """Keeps a module of its own: the one that trains is elsewhere. It moves to its accelerator when it first evaluates:
    by then executors have been forked."""

    def __init__(
        self,
        resident: Resident,
        test: Mapping[str, Tensor] | None,
        load: Callable[[int], Mapping[str, Tensor]] | None = None,
        clients: Sequence[int] = (),
        *,
        metrics: Metrics = NO_METRICS,
        accelerator: Callable[[], Accelerator] = lambda: HOST,
    ) -> None:
        """`test` are held-out samples, if there are any; `load` gives the data of `clients`, which are evaluated one by
        one."""
        self._resident = resident
        self.metrics = metrics
        self._accelerator = accelerator
        self._test = test
        self._placed = False
        self._load = load
        self._clients = clients

    def _typed(self, column: Tensor) -> Tensor:
        return column.to(self._resident.dtype) if column.dtype.is_floating_point else column

    def _cast(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        cast = {name: self._typed(column) for name, column in columns.items()}
        return all_to_device(self._resident.accelerator, cast)

    def _place(self) -> None:
        if not self._placed:
            self._resident = Resident(self._resident.module, self._accelerator())
            self._test = None if self._test is None else self._cast(self._test)
            self._placed = True

    def evaluate(
        self,
        model: Tensor,
        buffers: Mapping[str, Tensor] | None = None,
        own: Callable[[int], Tensor] | None = None,
    ) -> Evaluation:
        """In eval mode, without gradients. With `own`, every client is evaluated with its own model; the server's is
        nobody's then, and held-out samples say nothing."""
        self._place()
        module = self._resident.module
        self._resident.bind(self._resident.up(model))
        self._resident.set_buffers(all_to_device(self._resident.accelerator, buffers or {}))
        module.eval()
        with torch.no_grad():
            idle = self._test is None or own is not None
            found = None if idle or self._test is None else self._on(self._test)
            each = {str(client): self._of_client(client, own) for client in self._clients if self._load is not None}
        module.train()
        clients = client_figures(each, self.metrics.lower_is_better)
        return Evaluation(
            loss=None if found is None else found["loss"],
            metrics={} if found is None else {name: found[name] for name in self.metrics.names},
            clients=clients,
        )

    def check(self) -> None:
        """UserError where the model does not take the samples, or they or its outputs lack what a metric needs. On one
        thread: the caller may be forked after it."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        module = self._resident.module.eval()
        try:
            columns, whose = self._test, "evaluation"
            if columns is None and self._load is not None and self._clients:
                columns, whose = self._load(self._clients[0]), f"client {self._clients[0]}'s"
            if columns is not None:
                batch = {name: self._typed(column[:2]) for name, column in columns.items()}
                with torch.no_grad(), users_code(self._resident.given(whose, batch)):
                    loss_and_count(module, batch, uneven=True, metrics=self.metrics)
        finally:
            torch.set_num_threads(threads)
            module.train()

    def _of_client(self, client: int, own: Callable[[int], Tensor] | None) -> dict[str, float | None]:
        assert self._load is not None, "there are clients"
        if own is not None:
            self._resident.bind(self._resident.up(own(client)))
        return self._on(self._cast(self._load(client)))

    def _on(self, columns: Mapping[str, Tensor]) -> dict[str, float | None]:
        """Mean loss and metrics."""
        uneven = any(bool((c < 0).any()) for c in columns.values() if not c.is_floating_point())
        count, module = len(next(iter(columns.values()))), self._resident.module
        batches = ({n: c[start : start + BATCH] for n, c in columns.items()} for start in range(0, count, BATCH))
        loss, found = evaluate(module, batches, self.metrics, uneven=uneven)
        return {"loss": loss, **found}


_HELD_OUT = "held-out data (data.options.holdout above 0, or test=...) or training.eval_clients above 0"
_SITES = "[data] with held-out samples at the coordinator: sites keep their figures under masks or noise"
PERSONAL_CLIENTS = 100  # evaluated where models are personal, and the job does not say how many


def test_data(job: FederatedJob, data: ClientData | None) -> dict[str, Tensor] | None:
    """Held-out samples, at most `eval_samples`; None where the data holds none out."""
    assert job.data is not None, "there is something to evaluate on"
    most = job.training.eval_samples
    if isinstance(data, FemnistShaped):
        return data.held_out(most)
    try:
        held = load_dataset(_without(job.data, job.owner_column), "heldout")
    except NothingHeldOut:
        return None
    return held.batch(evaluation_rows(held, most), [c for c in held.columns if c != job.owner_column])


def _without(spec: DataSpec, column: str) -> DataSpec:
    """Return the data without the column that says whose a sample is: held-out samples are nobody's."""
    columns = spec.options.get("columns")
    if not isinstance(columns, Mapping):
        return spec
    wanted = {name: theirs for name, theirs in cast("Mapping[str, object]", columns).items() if name != column}
    return msgspec.structs.replace(spec, options={**spec.options, "columns": wanted})


def evaluator(job: FederatedJob, data: ClientData, *, personal: bool = False) -> Evaluator | None:
    """With a module of its own; None where nothing is evaluated. Where models are `personal`, clients are evaluated in
    any case."""
    config = job.training
    if not config.eval_every:
        return _none(job)
    population = len(data.sizes)
    wanted = config.eval_clients or (PERSONAL_CLIENTS if personal else 0)
    clients = np.unique(np.linspace(0, population - 1, min(population, wanted)).astype(int))
    chosen = clients.tolist() if wanted else []
    test = test_data(job, data)
    if test is None and not chosen:
        return _none(job)
    metrics, where = Metrics(job.metrics), lambda: accelerator_of(job, 0)
    made = Evaluator(Resident(build(job)), test, data.load, chosen, metrics=metrics, accelerator=where)
    made.check()
    return made


def site_evaluator(job: FederatedJob) -> Evaluator | None:
    """On the coordinator's own data, where it has some: the clients' are not here. UserError where metrics are asked
    for that nobody would have: sites report their own unless masks or noise cover their updates."""
    reported = job.privacy is None and not job.federated.aggregation.secure
    if reported and not (job.data is not None and job.training.eval_every):
        return None
    if not job.training.eval_every or job.data is None:
        return _none(job, _SITES)
    data = client_data(job.altered(partition=None)) if job.data.kind == FEMNIST else None
    test = test_data(job, data)
    if test is None:
        return None if reported else _none(job, _SITES)
    made = Evaluator(Resident(build(job)), test, metrics=Metrics(job.metrics))
    made.check()
    return made


def _none(job: FederatedJob, expected: str = _HELD_OUT) -> None:
    """UserError where metrics are asked for."""
    if job.metrics and not job.training.eval_every:
        raise UserError(f"metrics: got {list(job.metrics)} with training.eval_every = 0, expected 1 or more")
    if job.metrics:
        raise UserError(f"metrics: got {list(job.metrics)}, but nothing is evaluated: expected {expected}")


class RoundLine(msgspec.Struct, frozen=True, kw_only=True):
    """A committed round."""

    record: RoundRecord
    seconds: float  # from its opening to the server's new values
    opened_at_s: float | None = None  # since 1970, by the coordinator's clock; None in a run of versions before
    sent_bytes: int = 0
    """Bytes that the coordinator sent: whole frames, and values that executors of this machine read in shared memory in
    place of frames; so, too, what was received."""
    received_bytes: int = 0
    trips: int = 0  # messages from executors that brought values
    value_bytes: int = 0  # bytes of those values: 8 for a summed number, and those of collected values
    rules: str = ""  # when a round is closed
    evaluation: Evaluation | None = None

    @property
    def makespan_s(self) -> float:
        """Seconds of the executor that trained longest in the last pass, which is what was planned."""
        return max((sum(t.seconds for t in timed) for timed in self.record.trained.values()), default=0.0)

    def busy_s(self) -> dict[str, float]:
        """Seconds of training in all passes, by executor."""
        record = self.record
        names = record.trained.keys() | record.earlier_s.keys()
        spent = {name: sum(t.seconds for t in record.trained.get(name, ())) for name in names}
        return {name: last_s + record.earlier_s.get(name, 0.0) for name, last_s in spent.items()}

    @property
    def clients(self) -> int:
        return sum(map(len, self.record.trained.values()))

    def time_error(self) -> float | None:
        """Mean of |predicted - measured| / measured over the clients; None where nothing was predicted."""
        lines: Mapping[str, object] = self.record.lines
        errors = [
            abs(self.record.lines[name].seconds(t.samples) - t.seconds) / t.seconds
            for name, timed in self.record.trained.items()
            if name in lines
            for t in timed
            if t.seconds > 0
        ]
        return sum(errors) / len(errors) if errors else None


class RoundHistory(LinesFile[RoundLine]):
    """The lines of a run, in `rounds.jsonl`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, RoundLine, "history")

    @classmethod
    def of(cls, run: Path) -> RoundHistory:
        """Return the history of the run in this folder."""
        return cls(run / ROUND_LINES)

    def keep(self, rounds: int, note: Callable[[str], None] = lambda _: None) -> None:
        """Forget what comes after so many rounds, and what cannot be read, of which `note` is called."""
        self.keep_if(lambda line: line.record.round < rounds, note)
