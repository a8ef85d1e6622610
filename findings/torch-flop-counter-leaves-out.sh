#!/usr/bin/env bash
# torch 2.13.0, torch.utils.flop_counter.FlopCounterMode: an LSTM costs nothing on a CPU, an encoder layer nothing when
# it does not train, and the weight's gradient of a grouped convolution as much as one without groups.
#
# Expected: the mode counts the floating point operations of what runs in its context, and does so below the modules
# (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/flop_counter.py): matrix products, convolutions and
# attention in full.
# Seen: operators that are fused and not in its table count 0: aten.mkldnn_rnn_layer (LSTM on CPUs with oneDNN; GRU and
# RNN are counted) and aten._transformer_encoder_layer_fwd (nn.TransformerEncoderLayer in eval mode without gradients).
# The weight's gradient of a convolution with 8 groups counts 8 times too much. Nothing says what was left out.
# Why it matters: who shares work between unlike devices by these counts gives a recurrent layer to the slowest device,
# and takes MobileNet's depthwise layers for the dearest ones.
# Instead: pass custom_mapping with formulas for these operators, and compare each kind of layer with a count by hand.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
assert torch.backends.mkldnn.is_available(), "this torch has no oneDNN"


def flops(module: nn.Module, shape: tuple[int, ...], *, backward: bool = False) -> tuple[int, int]:
    with FlopCounterMode(display=False) as counter:
        given = torch.randn(shape, requires_grad=backward)
        out = module(given)
        forward = counter.get_total_flops()
        if backward:
            (out[0] if isinstance(out, tuple) else out).sum().backward()
    return forward, counter.get_total_flops() - forward


batch, length, width = 2, 16, 64
for kind, gates, factor in ((nn.RNN, 1, 1), (nn.GRU, 3, 1), (nn.LSTM, 4, 0)):
    right = 2 * batch * length * gates * width * (width + width)
    counted = flops(kind(width, width, batch_first=True), (batch, length, width), backward=True)
    print(f"{kind.__name__}: forward {counted[0]}, right {right}; backward {counted[1]}")
    assert counted[0] == factor * right and (counted[1] == 0) == (kind is nn.LSTM), "the behaviour changed"

layer = nn.TransformerEncoderLayer(width, 4, batch_first=True, dropout=0.0).eval()
trained = flops(layer, (batch, length, width))[0]
with torch.no_grad():
    quiet = flops(layer, (batch, length, width))[0]
print(f"TransformerEncoderLayer in eval mode: {trained} with gradients, {quiet} without")
assert trained > 0 and quiet == 0, "the behaviour changed"

for groups in (1, 8):
    forward, backward = flops(nn.Conv2d(8, 8, 3, groups=groups), (2, 8, 16, 16), backward=True)
    print(f"Conv2d with {groups} groups: backward is {backward / forward:.0f} times the forward, right 2")
    assert backward == (1 + groups) * forward, "the behaviour changed"
PY
