#!/usr/bin/env bash
# opacus 1.6.0 with torch 2.13.0: per-sample gradients of padded layers are wrong without an error. Summed over the
# samples they should be the gradient that autograd gives for the sum of the losses
# (https://opacus.ai/api/grad_sample_module.html: `grad_sample` holds the gradient of each sample).
#
# Seen: for Conv1d, Conv2d and Conv3d with padding_mode "circular", "reflect" or "replicate" the gradient of the weight
# is computed as if the padding were zeros, though the forward pads as asked: off by 10 % and more on small images.
# nn.Embedding(padding_idx=...) has a gradient for the padding row, which torch keeps at zero, so padding is trained.
# The model's validator finds no fault in either. force_functorch=True gives the right gradients.
# Why it matters: sites that train with differential privacy send updates of another function than the one they
# evaluate, and a padding row that should stay zero moves away. Loss still falls, so that nobody looks.
# Instead: wrap with GradSampleModule(..., force_functorch=True) or make_private(grad_sample_mode="functorch").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 opacus==1.6.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import copy

import torch
from opacus import GradSampleModule, __version__
from opacus.validators import ModuleValidator
from torch import nn

assert torch.__version__.split("+")[0] == "2.13.0" and __version__ == "1.6.0", (torch.__version__, __version__)
torch.manual_seed(0)


def off(module: nn.Module, given: torch.Tensor, *, functorch: bool = False) -> float:
    assert not ModuleValidator.validate(module)
    by_sample = GradSampleModule(copy.deepcopy(module), loss_reduction="sum", force_functorch=functorch)
    for each in (by_sample, module):
        each.zero_grad()
        each(given).square().sum().backward()
    summed = by_sample._module.weight.grad_sample.sum(0)
    return ((summed - module.weight.grad).norm() / module.weight.grad.norm()).item()


convolutions = ((nn.Conv1d, (4, 2, 8)), (nn.Conv2d, (4, 2, 8, 8)), (nn.Conv3d, (4, 2, 8, 8, 8)))
for kind, shape in convolutions:
    for mode in ("zeros", "circular", "reflect", "replicate"):
        layer, images = kind(2, 3, 3, padding=1, padding_mode=mode), torch.randn(shape)
        error = off(layer, images)
        print(f"{kind.__name__}, padding_mode {mode}: summed gradients off by {error:.1%}")
        assert (error < 1e-4) == (mode == "zeros"), "the behaviour changed"
        assert off(layer, images, functorch=True) < 1e-4

tokens = torch.tensor([[1, 2, 0, 0], [3, 1, 2, 0]])
for padding, right in ((None, True), (0, False)):
    layer = nn.Embedding(4, 3, padding_idx=padding)
    with torch.no_grad():
        layer.weight.normal_()
    error = off(layer, tokens)
    print(f"Embedding, padding_idx {padding}: summed gradients off by {error:.1%}")
    assert (error < 1e-4) == right, "the behaviour changed"
    assert off(layer, tokens, functorch=True) < 1e-4
PY
