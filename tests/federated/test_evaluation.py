"""What counts as a label that was found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.errors import UserError
from isthmus.federated.evaluation import Evaluator
from isthmus.federated.resident import Resident
from isthmus.graph.metrics import Metrics

TOKENS = torch.tensor([[0, 1, 2, 0], [2, 2, 0, 1]])


class Says(nn.Module):
    """That after token t comes t + 1 of three; on other inputs, what they hold. Its loss may move labels by one."""

    def __init__(self, *, moves: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.moves = moves

    def forward(self, labels: Tensor, input_ids: Tensor | None = None, scores: Tensor | None = None) -> object:
        if scores is None:
            assert input_ids is not None
            logits = (torch.eye(3)[(input_ids + 1) % 3] * self.scale).transpose(1, 2)
        else:
            logits = scores * self.scale
        compared = (logits[..., :-1], labels[:, 1:]) if self.moves else (logits, labels)
        return {"loss": F.cross_entropy(*compared), "logits": logits}


@pytest.mark.parametrize(
    ("columns", "moves", "accuracy"),
    [
        ({"input_ids": TOKENS, "labels": TOKENS}, True, 5 / 6),  # 2 after 2 is not as it says
        ({"input_ids": TOKENS, "labels": TOKENS}, False, 0.0),
        ({"input_ids": TOKENS, "labels": (TOKENS + 1) % 3}, False, 1.0),
        ({"input_ids": TOKENS, "labels": torch.tensor([[1, -100, -100, 0], [0, 0, -100, 2]])}, False, 4 / 5),
        ({"scores": torch.eye(3), "labels": torch.tensor([0, 1, 1])}, False, 2 / 3),
        ({"scores": torch.eye(3).T[None], "labels": torch.tensor([[0, 1, 1]])}, False, 2 / 3),
        ({"scores": torch.ones(2, 3, 4, 5), "labels": torch.zeros(2, 4, 5, dtype=torch.int64)}, False, 1.0),
        ({"scores": torch.eye(3), "labels": torch.full((3,), -100)}, False, None),
    ],
)
def test_accuracy_is_of_labels_that_are_classes(
    columns: dict[str, Tensor], moves: bool, accuracy: float | None
) -> None:
    resident = Resident(Says(moves=moves))
    evaluator = Evaluator(resident, columns, metrics=Metrics(["accuracy"]))
    evaluator.check()
    found = evaluator.evaluate(resident.vector()).metrics["accuracy"]
    assert found == (None if accuracy is None else pytest.approx(accuracy))


def test_a_model_that_does_not_take_the_columns_is_the_users_to_mend() -> None:
    evaluator = Evaluator(Resident(Says(moves=False)), {"pixel": TOKENS}, metrics=Metrics(["accuracy"]))
    with pytest.raises(UserError, match=r"model \(it takes .*\), given evaluation columns pixel: TypeError: "):
        evaluator.check()
