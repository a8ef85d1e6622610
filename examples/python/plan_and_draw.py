"""Plan a model for a fleet of your own, and draw the plan. Nothing is trained. Run it: python plan_and_draw.py"""

from pathlib import Path

import torch
from torch import nn

import isthmus
from isthmus.fleet import Links
from isthmus.report import draw_plan

GB = 2**30
fleet = isthmus.Fleet(
    name="lab",
    devices=(
        isthmus.Device(name="office-a", region="office", flops_per_s=2e10, memory_bytes=16 * GB),
        isthmus.Device(name="office-b", region="office", flops_per_s=2e10, memory_bytes=16 * GB),
        isthmus.Device(name="home-a", region="home", flops_per_s=1e10, memory_bytes=8 * GB),
    ),
    links=Links(
        default=isthmus.Link(latency_s=0.02, bandwidth_bytes_per_s=12.5e6),
        intra=isthmus.Link(latency_s=0.001, bandwidth_bytes_per_s=125e6),
    ),
)
model = nn.Sequential(*(nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True) for _ in range(3)))

plan = isthmus.plan(model, fleet, inputs=torch.randn(4, 64, 256), batch=64)
for number, replica in enumerate(plan.replicas):
    for stage in replica.stages:
        print(f"replica {number}, {stage.device}: operators {stage.first} to {stage.last}")
trace = isthmus.simulate(plan, fleet)
steps = trace.spans[-1].step + 1
simulated_s = max(span.end_s for span in trace.spans)
print(f"a step: {plan.predicted.step_s:.3f} s by the closed form; {steps} simulated steps: {simulated_s:.3f} s")
draw_plan(plan, fleet, Path("plan.png"))
