"""Accuracy counts what the loss compares, whatever its shapes; what the shapes alone do not say is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.errors import UserError
from isthmus.graph.capture import capture
from isthmus.graph.captured import Column
from isthmus.graph.metrics import Metrics
from isthmus.graph.outputs import evaluate
from isthmus.models import ModelSpec, build_model
from isthmus.training.engine import EngineConfig
from tests.training.in_process import Pipeline, weights_of
from tests.training.zoo import MODELS

N, L, C = 12, 5, 5
"""As many classes as places: no shape tells them apart."""
ACCURACY = Metrics(["accuracy"])


class Model(nn.Module):
    """Logits [N, L, C] of tokens, and what a loss of them returns beside them."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(C, 8), nn.Linear(8, C), loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        return {"loss": self.loss(logits, labels), "logits": logits}


def classes_last(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def one_class(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, 0], labels[:, 0])


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), labels.flatten(), ignore_index=3)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def data(*, same: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(C, (N, L), generator=generator)
    labels = ids.clone() if same else torch.randint(C, (N, L), generator=generator)
    labels[torch.rand(N, L, generator=generator) < 0.2] = -100
    return {"input_ids": ids, "labels": labels}


def expected(logits: Tensor, labels: Tensor, *, moved: bool = False) -> float:
    """Plain torch's, of all samples; classes are the last dimension."""
    if moved:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return (logits.argmax(-1) == labels)[labels >= 0].float().mean().item()


def eager(model: nn.Module, columns: Mapping[str, Tensor]) -> float | None:
    batches = [{name: column[first : first + 5] for name, column in columns.items()} for first in range(0, N, 5)]
    with torch.no_grad():
        return evaluate(model.eval(), batches, ACCURACY, uneven=True)[1]["accuracy"]


def staged(build: Callable[[], nn.Module], columns: Mapping[str, Tensor]) -> float | None:
    """Of a captured graph, by the engine."""
    described = {name: Column("int64", tuple(column.shape[1:]), uneven=True) for name, column in columns.items()}
    captured = capture(build, described, batch=4, metrics=ACCURACY.sums)
    pipeline = Pipeline(captured, [], weights_of(build, captured), EngineConfig(micro_batches=3, micro_batch_size=4))
    parts = zip(*(column.chunk(3) for column in columns.values()), strict=True)
    pipeline.evaluate([dict(zip(columns, part, strict=True)) for part in parts])
    return ACCURACY.values(0.0, pipeline.metrics)["accuracy"]


def built(loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(2)
    return Model(loss)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("loss", [classes_last, classes_second, one_class, log_probabilities, next_token])
def test_it_is_plain_torchs_of_what_the_loss_compares(loss: Callable[[Tensor, Tensor], Tensor], same: bool) -> None:
    columns, model = data(same=same), built(loss)
    if loss is log_probabilities:
        columns["labels"].masked_fill_(columns["labels"] < 0, 3)
    with torch.no_grad():
        logits, labels = model(**columns)["logits"], columns["labels"]
    if loss is one_class:
        logits, labels = logits[:, 0], labels[:, 0]
    if loss is log_probabilities:
        labels = labels.masked_fill(labels == 3, -100)
    found = expected(logits, labels, moved=loss is next_token)
    assert eager(model, columns) == pytest.approx(found)
    assert staged(lambda: built(loss), columns) == pytest.approx(found)


@pytest.mark.parametrize("same", [False, True])
def test_causal_models_of_transformers_move_labels(same: bool) -> None:
    def build() -> nn.Module:
        return build_model(ModelSpec(name="hf-llama", options=MODELS["hf-llama"][0].options))

    columns = data(same=same)
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        logits = model(**columns)["logits"]
    assert eager(model, columns) == pytest.approx(expected(logits, columns["labels"], moved=True))


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    return F.multi_margin_loss(logits.flatten(0, 1), labels.clamp(min=0).flatten())


@pytest.mark.parametrize(
    ("logits", "labels", "ids", "words"),
    [
        ((N, C), (N,), None, ""),
        ((N, C, 7), (N, 7), None, ""),
        ((N, 7, C), (N, 7), None, ""),
        ((N, 7, 7), (N, 7), None, r"do not say which dimension the classes are: expected a loss with one cross_entr"),
        ((N, 7, C), (N, 7), (N, 7), r"do not say whether labels are of the next token: expected a loss with one cros"),
        ((N, 1), (N,), None, "expected logits of two classes or more"),
        ((N, C), (N, C), None, "expected logits of two classes or more"),
    ],
)
def test_without_a_cross_entropy_shapes_say_it_or_it_is_refused(
    logits: tuple[int, ...], labels: tuple[int, ...], ids: tuple[int, ...] | None, words: str
) -> None:
    torch.manual_seed(5)
    scores, classes = torch.randn(logits), torch.randint(C, labels)
    batch = {"labels": classes} | ({} if ids is None else {"input_ids": torch.zeros(ids, dtype=torch.int64)})
    if words:
        with pytest.raises(UserError, match=words):
            ACCURACY.sums({"logits": scores}, batch, None)
        return
    right, count = ACCURACY.sums({"logits": scores}, batch, None).tolist()
    last = scores if logits[-1] == C else scores.transpose(1, 2)
    assert right / count == pytest.approx(expected(last, classes))


def test_a_loss_of_several_cross_entropies_is_refused_where_labels_may_be_moved() -> None:
    model = built(lambda logits, labels: classes_last(logits, labels) + next_token(logits, labels))
    with pytest.raises(UserError, match="do not say whether labels are of the next token"):
        eager(model, data())
    with pytest.raises(UserError, match="do not say whether labels are of the next token"):
        eager(built(margin), data())


def half_of_the_samples(outputs: object, batch: Mapping[str, Tensor]) -> object:
    return batch["labels"].sum(), batch["labels"].shape[0] / 2


def test_a_count_that_is_a_fraction_of_a_size_says_what_to_give() -> None:
    with pytest.raises(UserError, match=r"returned a fraction of a size, expected .* torch.ones_like\(labels\)"):
        capture(
            lambda: built(classes_last),
            {name: Column("int64", (L,)) for name in ("input_ids", "labels")},
            metrics=Metrics(["tests.metrics.test_accuracy:half_of_the_samples"]).sums,
        )
