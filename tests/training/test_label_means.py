"""The loss of a step is a mean over all labels of its batch with any number of micro-batches; so are its gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from in_process import Pipeline, module_of, weights_of
from tests.tiers import represented_by
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import MODELS

from isthmus.api.given import TARGET
from isthmus.data import ColumnSpec
from isthmus.data.description import DataDescription
from isthmus.errors import UserError
from isthmus.graph import Flow, assign, cuts, partition
from isthmus.graph.capture import Captured, Column, capture
from isthmus.graph.label_means import is_even
from isthmus.job import Job, checked, keep_prepared, kept_prepared, prepare
from isthmus.job.prepared import prepared_again
from isthmus.models import ModelSpec, build_model
from isthmus.models.registry import WithLoss, give_model
from isthmus.training.engine import EngineConfig
from isthmus.training.island import check_shares

BATCH, TOKENS, CLASSES = 4, 6, 5
Build = Callable[[], nn.Module]
IDS = Column("int64", (TOKENS,), uneven=True)


def llama(**more: object) -> nn.Module:
    return build_model(ModelSpec(name="hf-llama", options={**MODELS["hf-llama"][0].options, **more}))


def tagger() -> nn.Module:
    options = {**MODELS["hf-bert"][0].options, "num_labels": CLASSES}
    return build_model(ModelSpec(name="hf:BertForTokenClassification", options=options))


class Own(nn.Module):
    """Masks labels itself, of data that have them all."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(16, 8), nn.Linear(8, 16), loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        return self.loss(logits.flatten(0, 1), torch.where(input_ids > 9, -100, labels).flatten())


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, -1), labels)


class ClassesFirst(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.transpose(1, 2)


def with_loss() -> nn.Module:
    inner = nn.Sequential(nn.Embedding(16, 8), nn.Tanh(), nn.Linear(8, 16), ClassesFirst())
    return WithLoss(inner, nn.CrossEntropyLoss(weight=torch.arange(16) / 4), ("input_ids",), TARGET)


def uneven(labels: str = "labels") -> tuple[dict[str, Column], dict[str, Tensor]]:
    """Samples with 0, 1, 4 and 6 labels that count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (BATCH, TOKENS), generator=generator)
    found = torch.randint(0, CLASSES, (BATCH, TOKENS), generator=generator)
    for row, kept in enumerate((0, 1, 4, 6)):
        found[row, : TOKENS - kept] = -100
    return {"input_ids": IDS, labels: IDS}, {"input_ids": ids, labels: found}


def whole(labels: str = "labels") -> tuple[dict[str, Column], dict[str, Tensor]]:
    """As a data set has them that knows its classes."""
    _, data = uneven()
    plain = Column("int64", (TOKENS,))
    return {"input_ids": plain, labels: plain}, {"input_ids": data["input_ids"], labels: data["labels"].clamp(min=0)}


CASES: Mapping[str, tuple[Build, tuple[dict[str, Column], dict[str, Tensor]]]] = {
    "llama": (llama, uneven()),
    "token classes": (tagger, uneven()),
    "masked inside": (partial(Own, F.cross_entropy), whole()),
    "nll": (partial(Own, nll), uneven()),
    "weighted": (with_loss, uneven(TARGET)),
    "weighted, all count": (with_loss, whole(TARGET)),
}


def captured_of(build: Build, columns: Mapping[str, Column]) -> Captured:
    return capture(build, columns, batch=2)


@pytest.mark.parametrize("jax", [False, True])
@pytest.mark.parametrize("name", represented_by(CASES, "nll", "masked inside"))
def test_the_number_of_micro_batches_changes_no_objective(name: str, jax: bool) -> None:
    build, (columns, data) = CASES[name]
    if jax and name not in ("nll", "weighted"):
        pytest.skip("each takes seconds to compile")
    captured = captured_of(build, columns)
    weights = weights_of(build, captured)
    twin = module_of(build)
    result = twin(**data)
    expected = result if isinstance(result, Tensor) else result["loss"]  # torch's mean over the batch's labels
    expected.backward()
    gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    middle = [c.position for c in cuts(Flow(captured.train))]
    for count in (4,) if jax else (1, 2, 4):
        config = EngineConfig(micro_batches=count, micro_batch_size=BATCH // count)
        pipeline = Pipeline(captured, [middle[len(middle) // 2]], weights, config)
        if jax:
            jax_program = pytest.importorskip("isthmus.training.jax.program").jax_program
            for engine in pipeline.engines:
                engine.program, engine.evaluation_program = (
                    jax_program(engine.eager),
                    jax_program(engine.eager_evaluation),
                )
        parts = zip(*(column.chunk(count) for column in data.values()), strict=True)
        micro_batches = [dict(zip(data, part, strict=True)) for part in parts]
        loss, found = pipeline.step(0, micro_batches)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for parameter, value in gradients.items():
            torch.testing.assert_close(found[parameter], value, rtol=1e-4, atol=1e-6)
        assert pipeline.evaluate(micro_batches) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.long
def test_labels_that_all_count_keep_the_mean_and_its_bits() -> None:
    """Text has a limit and Hugging Face's models only move labels: there is nothing to count."""
    for build, (columns, _) in ((llama, whole()), (tagger, whole())):
        captured = captured_of(build, columns)
        assert captured.train.count is None and is_even(captured.train)


class Mixed(nn.Module):
    """A loss with a term of its own."""

    def __init__(self, term: Callable[[Tensor], Tensor], *, in_place: bool = False) -> None:
        super().__init__()
        self.layer, self.term, self.in_place = nn.Linear(3, CLASSES), term, in_place

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.layer(x)
        loss = F.cross_entropy(logits, labels)
        if self.in_place:
            loss += 0.1 * self.term(logits)
            return loss
        return loss + 0.1 * self.term(logits)


def test_a_mean_of_the_models_own_is_told_from_one_over_samples() -> None:
    columns = {"x": Column("float32", (3,)), "labels": Column("int64", ())}
    for term, in_place, even in (
        (lambda z: z.square().mean(), False, True),
        (lambda z: F.mse_loss(z, z.tanh()), True, True),
        (lambda z: z.mean() * z.exp().mean(), False, False),
        (lambda z: z.sum(), False, False),
    ):
        captured = captured_of(partial(Mixed, term, in_place=in_place), columns)
        assert captured.train.count is None and is_even(captured.train) == even
        assert not is_even(captured.train, uneven=True), "labels that are left out are counted in no term"
    summed = captured_of(partial(Own, partial(F.cross_entropy, reduction="sum")), whole()[0])
    assert summed.train.count is None and not is_even(summed.train)


@pytest.mark.parametrize(
    ("term", "limit", "even"),
    [
        (lambda z: z.square().mean(), CLASSES, True),
        (lambda z: z.square().mean(), None, False),  # labels may be left out
        (lambda z: z.mean() * z.exp().mean(), CLASSES, False),
    ],
)
def test_the_planner_does_not_choose_the_number_then(
    term: Callable[[Tensor], Tensor], limit: int | None, even: bool
) -> None:
    tables = {"x": ColumnSpec(dtype="float32", shape=(3,)), "labels": ColumnSpec(dtype="int64", limit=limit)}
    samples = DataDescription(columns=tables, train=32, heldout=0)

    def job(*counts: int) -> Job:
        return msgspec.convert(
            {
                "name": "own",
                "model": {"name": give_model(Mixed(term))},
                "data": {"kind": "npz", "options": {"path": "none"}},
                "fleet": "laptop",
                "training": {"batch_size": 8, "micro_batches": counts[0]},
                "plan": {"micro_batches": counts},
            },
            Job,
        )

    if even:
        assert prepare(job(4, 2), samples).captured.train.count is None
        return
    with pytest.raises(UserError, match=r"plan\.micro_batches: got \[4, 2\], expected one number: .*mean of its own"):
        prepare(job(4, 2), samples)
    with pytest.warns(UserWarning, match=r"a mean of its own: with 4 micro-batches .* set plan\.micro_batches = 1"):
        prepare(job(4), samples)


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def each_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    kept = (labels.flatten() >= 0).float()
    return (each_token(logits, labels) * kept).sum() / kept.sum()


def experts(logits: Tensor, labels: Tensor) -> Tensor:
    """As a mixture balances its experts: a product of two means over the batch."""
    chances = logits.softmax(-1).flatten(0, 1)
    return token_mean(logits, labels) + 0.1 * (chances.mean(0) * chances.square().mean(0)).sum()


def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    sample = logits.mean(1)
    return (sample @ sample.T).logsumexp(-1).mean()


class Loss(nn.Module):
    """`weights` is the weight of a penalty on the model's weights."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], weights: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head, self.loss, self.weights = nn.Embedding(16, 8), nn.Linear(8, CLASSES), loss, weights

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss(self.head(torch.tanh(self.embed(input_ids))), labels)
        return loss + self.weights * self.head.weight.square().sum() if self.weights else loss


LOSSES: Mapping[str, tuple[Build, bool]] = {
    "token mean": (partial(Loss, token_mean), True),
    "token mean of no label": (partial(Loss, lambda z, y: token_mean(z, torch.full_like(y, -100))), True),
    "per sample": (partial(Loss, lambda z, y: F.mse_loss(z.mean(1), F.one_hot(y[:, 0] % 3, CLASSES).float())), True),
    "all tokens": (partial(Loss, lambda z, y: each_token(z, y).mean()), True),
    "two terms": (partial(Loss, lambda z, y: each_token(z, y).mean() + 0.1 * z.square().mean()), True),
    "weights": (partial(Loss, lambda z, y: 2 * each_token(z, y).mean() + 1, 0.1), True),
    "twice": (partial(Loss, lambda z, y: 2 * token_mean(z, y) + 1), False),
    "with a term": (partial(Loss, lambda z, y: token_mean(z, y) + 0.1 * z.logsumexp(-1).square().mean()), False),
    "with weights": (partial(Loss, token_mean, 0.1), False),
    "two of them": (partial(Loss, lambda z, y: token_mean(z, y) + token_mean(z.flip(1), y.flip(1))), False),
    "own mean": (partial(Loss, masked_mean), False),
    "sum": (partial(Loss, lambda z, y: each_token(z, y).sum()), False),
    "experts": (partial(Loss, experts), False),
    "mean of a stack": (partial(Loss, lambda z, y: torch.stack([token_mean(z, y), z.mean()]).mean()), False),
    "between samples": (partial(Loss, contrastive), False),
}


def own_job(build: Build, batch: int = BATCH, **more: object) -> tuple[Job, DataDescription]:
    column = ColumnSpec(dtype="int64", shape=(TOKENS,))
    job = {
        "name": "own",
        "model": {"name": give_model(build())},
        "data": {"kind": "npz", "options": {"path": "none"}},
        "training": {"batch_size": batch},
        **more,
    }
    samples = DataDescription(columns={"input_ids": column, "labels": column}, train=32, heldout=0)
    return checked(msgspec.convert(job, Job)), samples


@pytest.mark.parametrize(
    "name", represented_by(LOSSES, "token mean", "token mean of no label", "with a term", "experts")
)
def test_by_default_a_step_is_that_of_the_plain_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and the gradients of a step, on one device and on two: of the whole batch by default, whatever the loss;
    with a number that was asked for too where it does not depend on it. Else they are means over the micro-batches."""
    build, even = LOSSES[name]
    _, data = uneven()
    for asked in (None, 1, 2, 4):
        job, samples = own_job(build, training={"batch_size": BATCH, "micro_batches": asked})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prepared = prepare(job, samples)
        captured = prepared.captured
        if captured.train.batch is None:  # of every number of samples: once is enough
            monkeypatch.setattr("isthmus.job.prepared.cached_capture", partial(given_back, captured))
        count = prepared.job.micro_batches
        assert count == (asked or (BATCH if even else 1))
        words = " ".join(str(w.message) for w in caught if "mean of its own" in str(w.message))
        if even or asked == 1:
            assert not words
        elif asked is None:
            assert "by default that is 1 here, not 4. For more " in words
            assert words.endswith("or set training.micro_batches")
        else:
            assert f"with {asked} micro-batches" in words and words.endswith("or set training.micro_batches = 1")
        expected, gradients = 0.0, dict[str, Tensor]()
        for part in [data] if even else chunks(data, count):
            twin = module_of(build)
            loss = twin(**part)
            loss.backward()
            share = 1 if even else count
            expected += loss.item() / share
            for n, p in twin.named_parameters():
                gradients[n] = gradients.get(n, 0) + (torch.zeros(()) if p.grad is None else p.grad) / share
        if name == "token mean of no label":  # torch's is 0 / 0; nothing is learned of nothing
            expected, gradients = 0.0, {n: torch.zeros_like(g) for n, g in gradients.items()}
        middle = next(c.position for c in cuts(Flow(prepared.captured.train)))
        for boundaries in ([], [middle]):
            pipeline = Pipeline(
                prepared.captured, boundaries, weights_of(build, prepared.captured), prepared.job.engine()
            )
            found, made = pipeline.step(0, chunks(data, count))
            assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)
            for parameter, value in gradients.items():
                if parameter in made or value.count_nonzero():
                    torch.testing.assert_close(made[parameter], value, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "name", ["token mean", "two terms", "weights", "own mean", "sum", "experts", "mean of a stack"]
)
def test_ranks_share_out_no_mean_of_the_models_own(name: str) -> None:
    build, even = LOSSES[name]
    captured = captured_of(build, uneven()[0])
    flow = Flow(captured.train)
    (first, *_) = [c.position for c in cuts(flow)]
    stages = partition(flow, assign(flow, [first]))
    config = EngineConfig(micro_batches=1, micro_batch_size=BATCH)
    check_shares(config, stages[0], 2)
    if even:
        check_shares(config, stages[1], 2)
        return
    with pytest.raises(UserError, match=r"(a loss that is a mean of its own|in stage 1) on a device of several ranks"):
        check_shares(config, stages[1], 2)


def given_back(captured: Captured, *_: object) -> Captured:
    return captured


def chunks(data: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    parts = zip(*(column.chunk(count) for column in data.values()), strict=True)
    return [dict(zip(data, part, strict=True)) for part in parts]


def test_whoever_goes_on_arrives_at_the_same_number(tmp_path: Path) -> None:
    """A restart, and who has the model captured."""
    job, samples = own_job(partial(Loss, masked_mean), batch=16)
    assert (job.training.micro_batches, job.micro_batches, job.counts) == (None, 8, (8,))
    with pytest.warns(UserWarning, match="by default that is 1 here, not 8"):
        prepared = prepare(job, samples)
    keep_prepared(prepared, tmp_path / "captured")
    for asked in (job, prepared.job):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept, again = kept_prepared(asked, tmp_path / "captured"), prepared_again(prepared, asked)
        assert kept is not None and kept.job == again.job == prepared.job and prepared.job.micro_batch_size == 16
        assert again.captured is prepared.captured
    assert kept_prepared(job.cut_into(4), tmp_path / "captured") is None


def test_the_default_is_the_largest_number_up_to_eight_that_divides_the_batch() -> None:
    assert [own_job(partial(Loss, token_mean), batch)[0].micro_batches for batch in (1, 6, 7, 12, 13, 32)] == [
        *(1, 6, 7, 6, 1, 8)
    ]
