#!/usr/bin/env bash
# torch 2.13.0: aten.mse_loss, aten.smooth_l1_loss and aten.huber_loss take an input and a target of different shapes
# that broadcast, and return the right loss. The gradient of the smaller one is too large by the number of repetitions:
# it is summed over elements that were already counted. aten.l1_loss is right. torch.nn.functional broadcasts before it
# calls the operator, so only programs that call operators of an exported graph meet this, for example after a pass that
# removes broadcast_tensors.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch

assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__


def gradient(name: str, *, broadcast_first: bool) -> torch.Tensor:
    given = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    pair = (given, torch.zeros(3, 4))
    operator = getattr(torch.ops.aten, name)
    operator(*(torch.broadcast_tensors(*pair) if broadcast_first else pair)).backward()
    return given.grad


for name, repeated in (("l1_loss", 1), ("mse_loss", 4), ("smooth_l1_loss", 4), ("huber_loss", 4)):
    direct, right = (gradient(name, broadcast_first=first) for first in (False, True))
    print(f"aten.{name}: {direct.flatten().tolist()}, right {right.flatten().tolist()}")
    assert torch.allclose(direct, repeated * right), "the behaviour changed"
PY
