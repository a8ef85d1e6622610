#!/usr/bin/env bash
# nvflare 2.9.0, BaseFedAvg.aggregate_fn: the mean of float16 models is infinite once steps times weights pass 65,504.
#
# Expected: the mean of models lies between the least and the largest of them, and the mean of equal models is that
# model, however many steps each client reports.
# Seen: each model is multiplied by its client's number of steps and added up in the models' own type, and divided at the
# end. Ten clients send the same float16 model with weights up to 8: with 1 or 100 steps each more than half of the numbers
# come back as another, by up to 0.2 %; with 1,000 steps every weight above 6.55 comes back infinite. No error is raised:
# numpy's warning of an overflow is all. The same models as float32 come back to 1e-6 for any steps.
# Why it matters: fine-tuning keeps models in half types to save the wire, norms of language models have weights above 6.55,
# and a run that works with short rounds breaks when rounds are made longer.
# Instead: cast to float32 before sending (or in a filter on the server), or report no steps, which makes all clients equal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nvflare==2.9.0 numpy==2.4.6
cat > "$folder/run.py" <<'PY'
import warnings
from importlib.metadata import version

import numpy as np
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.workflows.base_fedavg import BaseFedAvg

CLIENTS = 10


def mean(model: np.ndarray, steps: int) -> np.ndarray:
    """Of clients that send this model after as many steps each."""
    meta = {FLMetaKey.NUM_STEPS_CURRENT_ROUND: steps}
    results = [
        FLModel(params_type=ParamsType.FULL, params={"w": model.copy()}, current_round=0, meta=dict(meta))
        for _ in range(CLIENTS)
    ]
    return BaseFedAvg.aggregate_fn(results).params["w"]


assert version("nvflare") == "2.9.0", version("nvflare")
warnings.simplefilter("ignore", RuntimeWarning)
model = np.random.default_rng(0).uniform(0.5, 8, 10_000).astype(np.float16)
for steps in (1, 100, 1000):
    half, single = mean(model, steps), mean(model.astype(np.float32), steps)
    other, infinite = (half != model).mean(), np.isinf(half)
    least = f", from {model[infinite].min()} on" if infinite.any() else ""
    error = np.abs(half.astype(float) / model - 1)[~infinite].max()
    print(f"{steps} steps, {half.dtype}: {other:.0%} are another, by up to {error:.2%}; {infinite.mean():.0%} infinite{least}")
    assert np.abs(single / model - 1).max() < 1e-6
    assert half.dtype == np.float16
    assert other > 0.5
    if steps < 1000:
        assert not infinite.any()
        assert 0.0005 < np.abs(half.astype(float) / model - 1).max() < 0.01
    else:
        assert 6.5 < model[infinite].min() < 6.6
        assert infinite[model > 6.6].all()
PY
"$folder/venv/bin/python" "$folder/run.py"
