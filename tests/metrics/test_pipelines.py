"""Metrics of pipelines and of replicas are plain torch's on the whole held-out set, whole micro-batches or not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isthmus
from isthmus.api.folder import RunFolder
from isthmus.api.given import Objects
from isthmus.api.observer import Silent
from isthmus.api.run_entries import run_entries
from isthmus.api.stored_run import Uploads
from isthmus.api.watch import PipelineWatch, Watch
from isthmus.callbacks import Callbacks
from isthmus.cost import PlanLayout, build_replicas
from isthmus.data import DataSpec, load_dataset
from isthmus.errors import UserError
from isthmus.job import fleet_of, prepare
from isthmus.plans import Plan
from isthmus.protocol import StateLayout
from isthmus.protocol.leases import Leases
from isthmus.runtime.coordinator.run import run_spec
from tests.metrics.plain import Classifier, confidence, measured, samples, top_two
from tests.tiers import represented_by

METRICS = ["accuracy", "perplexity", top_two, confidence]
HELD = 53
"""Samples: 13 micro-batches of 4, and one sample more."""
FLEET = """
name = "three"

[[device]]
name = "d"
region = "desk"
compute = "10 GFLOPS"
memory = "1 GiB"
count = 3

[links]
intra = { latency = "100 us", bandwidth = "1 Gbit/s" }
"""


class Lines(isthmus.Observer):
    def __init__(self) -> None:
        self.lines = list[str]()

    def note(self, text: str) -> None:
        self.lines.append(text)


CHAIN = [PlanLayout(("d-0", "d-1", "d-2"), (2, 4), 4)]
TWO = [PlanLayout(("d-0",), (), 3), PlanLayout(("d-1", "d-2"), (4,), 1)]


def data(split: str) -> dict[str, torch.Tensor]:
    return samples(64) if split == "train" else samples(HELD, 7)


def train(folder: Path, **more: object) -> isthmus.Run:
    torch.manual_seed(1)
    overrides = {"training.eval_every": 2, "training.micro_batches": 4, "runtime.emulate": False}
    given: dict[str, object] = {
        "model": Classifier(),
        "loss": F.cross_entropy,
        "data": data,
        "steps": 4,
        "batch": 16,
        "metrics": METRICS,
        "run": folder / "run",
    }
    given |= more
    given["overrides"] = overrides | dict(given.get("overrides", {}))  # pyright: ignore
    return isthmus.train(**given)  # pyright: ignore[reportArgumentType]


def check(run: isthmus.Run, model: nn.Module) -> None:
    """The newest figures are those of the newest weights."""
    trained = copy.deepcopy(model)
    run.load(trained)
    newest = run.heldout[-1]
    assert len(run.heldout) == 2
    assert {"loss": newest.loss, **newest.metrics} == pytest.approx(measured(trained, samples(HELD, 7)), rel=2e-5)


def plan_of(folder: Path, layouts: list[PlanLayout], **more: object) -> Plan:
    given: dict[str, object] = {"model": Classifier(), "loss": F.cross_entropy, "data": data, "batch": 16, **more}
    overrides = {"training.eval_every": 2, "training.micro_batches": 4}
    prepared = prepare(Objects(given).job(folder / "given", overrides))  # pyright: ignore[reportArgumentType]
    return build_replicas(prepared.problem(fleet_of(prepared.job)), layouts, planner="even")


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    (tmp_path / "fleet.toml").write_text(FLEET)
    return str(tmp_path / "fleet.toml")


@pytest.mark.long
def test_of_three_stages(fleet: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, CHAIN, fleet=fleet)
    run = train(tmp_path, plan=plan, fleet=fleet)
    assert [len(replica.stages) for replica in run.plan.replicas] == [3]
    check(run, Classifier())
    written = (run.path / "losses.jsonl").read_text()
    assert '"top_two"' in written
    assert run.pictures["metrics"].is_file()
    entry = next(e for e in run_entries(run.path) if e.kind == "heldout")
    assert entry.metrics == run.heldout[0].metrics


@pytest.mark.long
def test_of_two_replicas(fleet: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, TWO, fleet=fleet)
    check(train(tmp_path, plan=plan, fleet=fleet), Classifier())


@pytest.mark.long
@pytest.mark.parametrize("layouts", [CHAIN, TWO], ids=["chain", "replicas"])
def test_of_a_last_stage_that_jax_computes(layouts: list[PlanLayout], fleet: str, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    overrides = {"runtime.engine": {"d-2": "jax"}}
    plan = plan_of(tmp_path, layouts, fleet=fleet)
    check(train(tmp_path, plan=plan, fleet=fleet, overrides=overrides), Classifier())


def check_decoupled(run: isthmus.Run) -> None:
    """The newest figures are those of the merged weights."""
    trained, newest = Classifier(), run.heldout[-1]
    run.load(trained)
    assert {"loss": newest.loss, **newest.metrics} == pytest.approx(measured(trained, samples(HELD, 7)), rel=2e-5)


DECOUPLED = {
    "sync.mode": "decoupled",
    "sync.decoupled.replicas": [["d-0", "d-1"], ["d-2"]],
    "training.micro_batches": 4,
}


def test_of_a_pipeline_and_a_device_as_decoupled_replicas(fleet: str, tmp_path: Path) -> None:
    run = train(tmp_path, fleet=fleet, overrides=DECOUPLED)
    check_decoupled(run)
    assert (run.path / "metrics.png").is_file()


@pytest.mark.long
@pytest.mark.parametrize(
    "groups", [[["d-0"], ["d-1"], ["d-2"]], [["d-0", "d-1", "d-2"]]], ids=["devices", "a pipeline"]
)
def test_of_decoupled_replicas_that_jax_computes(groups: list[list[str]], fleet: str, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    notes, rules = Lines(), {"sync.mode": "decoupled", "sync.decoupled.replicas": groups, "training.micro_batches": 3}
    overrides = {**rules, "planner": "even", "runtime.engine": "jax"}
    run = train(tmp_path, fleet=fleet, batch=12, overrides=overrides, observer=notes)
    check_decoupled(run)
    by_jax = [line for line in notes.lines if "computed by JAX" in line]
    gave = {c.replica for line in run.merges for f in line.merge.fragments for c in f.contributions}
    assert gave and all(any(line.startswith(f"{name}: ") for line in by_jax) for name in gave), notes.lines
    assert len(by_jax) >= (3 if len(groups) == 1 else 1)


@pytest.mark.long
@pytest.mark.parametrize("merges", [False, True], ids=["average", "never wait"])
def test_of_replicas_that_are_compiled_where_it_pays(merges: bool, fleet: str, tmp_path: Path) -> None:
    """Two that average; one that is a pipeline and merges."""
    notes, overrides = Lines(), {"devices": 2, "runtime.compile": True}
    if merges:
        overrides |= {"planner": "even", "sync.mode": "decoupled", "sync.decoupled.replicas": [["d-0", "d-1"]]}
        check_decoupled(train(tmp_path, fleet=fleet, overrides=overrides, observer=notes))
    else:
        plan = plan_of(tmp_path, [PlanLayout(("d-0",), (), 2), PlanLayout(("d-1",), (), 2)], fleet=fleet)
        check(train(tmp_path, plan=plan, fleet=fleet, overrides=overrides, observer=notes), Classifier())
    times = [line for line in notes.lines if re.search(r"d-[01]: (compiled in|not compiled: it would take)", line)]
    assert len(times) == 2, notes.lines


def test_of_decoupled_replicas(fleet: str, tmp_path: Path) -> None:
    overrides = {"sync.mode": "decoupled", "training.micro_batches": 3}
    check_decoupled(train(tmp_path, fleet=fleet, batch=12, overrides=overrides))


class Tagger(nn.Module):
    """A class for each of four tokens; labels of -100 are left out of the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embed(x)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tokens(split: str) -> dict[str, torch.Tensor]:
    """Of held-out samples, each has another number of labels."""
    count = 32 if split == "train" else 21
    x = torch.randint(8, (count, 4), generator=torch.Generator().manual_seed(count))
    labels = x % 3
    labels[torch.arange(4) >= (torch.arange(count) % 4 + 1)[:, None]] = -100
    return {"x": x, "labels": labels}


@pytest.mark.long
def test_each_label_counts_once_where_micro_batches_have_different_numbers(tmp_path: Path) -> None:
    run = train(tmp_path, model=Tagger(), loss=None, data=tokens, metrics=["accuracy", "perplexity"])
    trained, held = Tagger(), tokens("heldout")
    run.load(trained)
    with torch.no_grad():
        found = trained(**held)
    kept = held["labels"] >= 0
    accuracy = (found["logits"].argmax(-1) == held["labels"])[kept].float().mean().item()
    newest = run.heldout[-1]
    assert newest.loss == pytest.approx(found["loss"].item(), rel=2e-5)
    expected = {"accuracy": accuracy, "perplexity": found["loss"].exp().item()}
    assert newest.metrics == pytest.approx(expected, rel=2e-5)


def test_held_out_samples_may_be_fewer_than_a_micro_batch(tmp_path: Path) -> None:
    few = {"x": samples(3, 7)["x"], "target": samples(3, 7)["target"]}
    run = train(tmp_path, data=lambda split: samples(64) if split == "train" else few)
    trained = Classifier()
    run.load(trained)
    newest = run.heldout[-1]
    assert {"loss": newest.loss, **newest.metrics} == pytest.approx(measured(trained, few), rel=2e-5)


def mean_of_logs(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As `cross_entropy`, of operators that are no losses of torch's."""
    return -(logits.log_softmax(-1) * F.one_hot(target, 5)).sum(-1).mean()


@pytest.mark.parametrize(("loss", "count"), [(F.cross_entropy, 1), (F.cross_entropy, HELD), (mean_of_logs, 1)])
def test_a_rest_in_bf16_is_as_near_as_whole_micro_batches(loss: object, count: int, tmp_path: Path) -> None:
    """A rest of one sample of 16: roundings of its mean in bf16 would be 16 times as large."""
    held = samples(count, 7)
    overrides = {"training.precision": "bf16", "training.micro_batches": 1}
    run = train(
        tmp_path,
        loss=loss,
        data=lambda split: samples(64) if split == "train" else held,
        metrics=["accuracy", confidence] if loss is F.cross_entropy else [confidence],
        overrides=overrides,
    )
    trained = Classifier()
    run.load(trained)
    expected = measured(trained.bfloat16(), {"x": held["x"].bfloat16(), "target": held["target"]}, wide=True)
    newest = run.heldout[-1]
    names = ("loss", *newest.metrics)
    found = {"loss": newest.loss, **newest.metrics}
    assert found == pytest.approx({name: expected[name] for name in names}, rel=3e-3)


def scaled(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean of its own: labels of -100 make samples weigh unlike in it."""
    return 1.0 * F.cross_entropy(logits, target)


@pytest.mark.parametrize(("loss", "rest"), [(F.cross_entropy, 1), (scaled, 0)])
def test_a_rest_is_evaluated_unless_the_loss_weighs_samples_unlike(loss: object, rest: int, tmp_path: Path) -> None:
    """Copies that fill a micro-batch up could not be taken off such a mean again: cross-entropy came out below 0."""
    given: dict[str, object] = {"model": Classifier(), "loss": loss, "data": data, "batch": 16}
    overrides = {"training.eval_every": 2, "training.micro_batches": 4}
    prepared = prepare(Objects(given).job(tmp_path / "given", overrides))  # pyright: ignore[reportArgumentType]
    assert (prepared.eval_micro_batches, prepared.eval_rest) == (13, rest)
    assert [note.partition(":")[0] for note in prepared.eval_notes] == (
        [] if rest else ["evaluations leave out 1 of 53 held-out samples"]
    )


def reads(outputs: object, batch: object) -> float:
    assert isinstance(outputs, torch.Tensor)
    return outputs.mean().item()


def heldout_loss(outputs: object, batch: object) -> torch.Tensor:
    return torch.ones(())


def bad_form(outputs: object, batch: object) -> object:
    return torch.ones(3), torch.ones(())


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["acuracy"], "unknown metric 'acuracy'"),
        (["no_such_module:f"], "no_such_module"),
        ([heldout_loss], "metrics: got 'heldout_loss', expected another name"),
        (
            [reads],
            r"metrics: reads reads a value of a tensor: it becomes part of the graph, expected torch operators only",
        ),
        ([bad_form], r"metrics: bad_form returned \[3\] of float32, a scalar, expected \(sum, count\)"),
    ],
)
def test_what_is_no_metric_is_refused_before_the_run(metrics: list[object], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(tmp_path, metrics=metrics)
    assert not (tmp_path / "run" / "losses.jsonl").exists()


def test_what_cannot_be_had_says_why_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics: accuracy: the model returned a scalar, expected its logits"):
        train(tmp_path, model=Alone(F.multi_margin_loss), loss=None, metrics=["accuracy"])
    with pytest.raises(UserError, match=r"metrics: got \['accuracy'\] with training.eval_every = 0"):
        train(tmp_path, metrics=["accuracy"], overrides={"training.eval_every": 0})
    with pytest.raises(UserError, match=r"labels \[batch, 5\] of float32, expected logits of two classes or more"):
        train(tmp_path, loss=F.mse_loss, data=regression, metrics=["accuracy"])


class Alone(nn.Module):
    """Returns its loss and nothing else."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.loss = nn.Linear(6, 5), loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layers(x), target)


def regression(split: str) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(32, 6), "target": torch.randn(32, 5)}


@pytest.mark.long
def test_a_test_set_is_evaluated_ten_times_and_all_of_the_data_train(tmp_path: Path) -> None:
    torch.manual_seed(1)
    given = {"model": Classifier(), "loss": F.cross_entropy, "data": samples(64), "test": samples(HELD, 7)}
    run = isthmus.train(**given, steps=20, batch=16, metrics=["accuracy"], run=tmp_path / "run")  # pyright: ignore
    assert [point.step for point in run.heldout] == list(range(2, 21, 2))
    trained = Classifier()
    run.load(trained)
    expected = measured(trained, samples(HELD, 7))
    newest = run.heldout[-1]
    assert (newest.loss, newest.metrics["accuracy"]) == pytest.approx((expected["loss"], expected["accuracy"]))


@pytest.mark.parametrize("kind", ["npz", "text"])
def test_held_out_data_are_a_path_in_a_job_file(kind: str, tmp_path: Path) -> None:
    for number, name in enumerate(("train", "held")):
        rows = 40 - 10 * number
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((rows, 2), np.float32))
        (tmp_path / f"{name}.txt").write_text("x" * (8 * rows + 1))
    options: dict[str, object] = {"path": "train.npz"}
    if kind == "text":
        options = {"files": "train.txt", "sequence_length": 8}
    spec = DataSpec(kind=kind, options=options, heldout="held.txt" if kind == "text" else "held.npz")
    spec = spec.counted_from(str(tmp_path))
    assert [len(load_dataset(spec, split)) for split in ("train", "heldout")] == [40, 30]


def test_held_out_data_of_a_kind_without_a_path_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.heldout: got 'x' with kind 'digits', expected one of .*npz"):
        load_dataset(DataSpec(kind="digits", heldout="x"), "train")
    both = DataSpec(kind="npz", options={"path": "a", "heldout_path": "b"}, heldout="c")
    with pytest.raises(UserError, match=r"data\.heldout: got one beside data\.options\.heldout_path"):
        load_dataset(both, "train")


@pytest.mark.parametrize("step", represented_by([2, 4], 4))
def test_an_evaluation_that_a_stop_interrupts_is_made_when_the_run_goes_on(step: int, tmp_path: Path) -> None:
    """Whether the stop comes before its end or after it, it is made once, and last of all."""

    class Stopping(isthmus.Callback):
        def start(self, started: isthmus.RunStarted) -> None:
            self._stop = started.stop

        def step(self, done: isthmus.StepDone) -> None:
            if done.step == step:
                self._stop()

    held = samples(2000, 7)
    more: dict[str, object] = {"data": lambda split: samples(64) if split == "train" else held}
    more["overrides"] = {"training.eval_samples": 2000}
    train(tmp_path, callbacks=[Stopping()], **more)
    run = train(tmp_path, resume=True, **more)
    assert [point.step for point in run.heldout] == [2, 4] and run.outcome == "done"
    trained = Classifier()
    run.load(trained)
    newest = run.heldout[-1]
    assert {"loss": newest.loss, **newest.metrics} == pytest.approx(measured(trained, held), rel=2e-5)


class Evaluations(Silent):
    def __init__(self) -> None:
        self.steps = list[int]()

    def evaluated(self, found: isthmus.Evaluated) -> None:
        self.steps.append(found.step)


def test_an_evaluation_that_a_lost_device_interrupts_is_ended(tmp_path: Path) -> None:
    """Its items that were made are not made again."""
    given: dict[str, object] = {"model": Classifier(), "loss": F.cross_entropy, "data": data, "batch": 16}
    overrides = {"training.eval_every": 2, "training.micro_batches": 4, "training.steps": 4}
    prepared = prepare(Objects(given).job(tmp_path / "given", overrides))  # pyright: ignore[reportArgumentType]
    fleet = fleet_of(prepared.job)
    layout = PlanLayout((fleet.devices[0].name,), (), 4)
    plan, seen = build_replicas(prepared.problem(fleet), [layout], planner="even"), Evaluations()
    (tmp_path / "run").mkdir()
    watched = Watch(RunFolder.empty(tmp_path / "run"), Callbacks(()), Uploads(), seen)
    watch = PipelineWatch(prepared, plan, watched)
    alone = StateLayout(parts={"d": frozenset({"weights"})})
    leases, made = Leases(run_spec(prepared), alone), 0
    while not made:
        leases.lease()
        item = leases.finish(min(leases.open))
        if item.kind == "eval":
            watch.evaluated(item, (1.0 * item.micro_batches, float(item.micro_batches)))
            made = item.step
    leases.begin(made, alone, due=True)
    watch.rolled_back(made)
    while leases.lease() or leases.open:
        item = leases.finish(min(leases.open))
        if item.kind == "eval":
            watch.evaluated(item, (1.0 * item.micro_batches, float(item.micro_batches)))
    assert seen.steps == [2, 4]
