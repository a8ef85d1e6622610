#!/usr/bin/env bash
# flwr 1.42.0, flwr.server.strategy.QFedAvg: q changes no client's share of the average, since one loss stands for all.
#
# Expected: q-FedAvg (Li et al. 2020, "Fair Resource Allocation in Federated Learning", Algorithm 2) weighs each client's
# update by its own loss to the power q, so that a client that the model serves badly moves it more.
# Seen: the loss is that of the server's own evaluation function, the same number for every client. Losses that clients
# report are not read. Of two clients with equally long updates and losses of 10 and 0.1 each moves the model as far as
# the other, for any q; the model is the same bit for bit when they exchange their losses. A larger q shortens both.
# The strategy of the same name in flwr.serverapp.strategy reads each client's training loss and does weigh.
# Why it matters: a study of fairness by q with the first strategy compares server learning rates.
# Instead: use flwr.serverapp.strategy.QFedAvg, or weigh in a strategy of one's own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check flwr==1.42.0
cat > "$folder/run.py" <<'PY'
from importlib.metadata import version

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import QFedAvg
from flwr.serverapp.strategy import QFedAvg as NewQFedAvg
from flwr.supercore.task_identity import TaskIdentity

STEPS = (np.array([1.0, 0.0]), np.array([0.0, 1.0]))  # where two clients end that began at the origin


def old(q: float, losses: tuple[float, float]) -> np.ndarray:
    def answer(model: np.ndarray, loss: float) -> FitRes:
        metrics = {"loss": loss, "train_loss": loss}
        return FitRes(Status(Code.OK, ""), ndarrays_to_parameters([model]), num_examples=10, metrics=metrics)

    strategy = QFedAvg(
        q_param=q,
        qffl_learning_rate=0.1,
        evaluate_fn=lambda *_: (sum(losses) / 2, {}),
        fit_metrics_aggregation_fn=lambda _: {},
    )
    strategy.pre_weights = [np.zeros(2)]
    results = [(None, answer(model, loss)) for model, loss in zip(STEPS, losses)]
    return parameters_to_ndarrays(strategy.aggregate_fit(1, results, [])[0])[0]


def new(q: float, losses: tuple[float, float]) -> np.ndarray:
    strategy = NewQFedAvg(client_learning_rate=0.1, q=q, train_loss_key="train_loss")
    strategy.current_arrays = ArrayRecord([np.zeros(2)])
    replies = []
    for number, (model, loss) in enumerate(zip(STEPS, losses)):
        asked = Message(RecordDict(), dst_node_id=number + 1, message_type="train")
        content = RecordDict(
            {"arrays": ArrayRecord([model.copy()]), "metrics": MetricRecord({"train_loss": loss, "num-examples": 10})}
        )
        replies.append(Message(content, reply_to=asked))
    return strategy.aggregate_train(1, replies)[0].to_numpy_ndarrays()[0]


assert version("flwr") == "1.42.0", version("flwr")
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # a started run sets these
for q in (0.0, 1.0, 5.0):
    print(f"q {q:g}, losses 10 and 0.1: flwr.server {old(q, (10.0, 0.1))}, flwr.serverapp {new(q, (10.0, 0.1))}")
for q in (1.0, 5.0):
    moved, exchanged = old(q, (10.0, 0.1)), old(q, (0.1, 10.0))
    assert moved[0] == moved[1] and (moved == exchanged).all(), "the behaviour changed"
    first, second = new(q, (10.0, 0.1))
    assert abs(first / second / (10.0 / 0.1) ** q - 1) < 1e-6, "the behaviour changed"
print("flwr.server.strategy.QFedAvg: both clients move the model alike, whatever their losses and q")
PY
FLWR_TELEMETRY_ENABLED=0 "$folder/venv/bin/python" -W ignore "$folder/run.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
