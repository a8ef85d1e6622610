"""Makes recorded.zip again: `python -m tests.dashboard.record`. A run of six devices at three sites, of which one is
killed in the middle. Tests read from it what they expect, so another recording does as well."""

from __future__ import annotations

import os
import signal
import tempfile
import zipfile
from pathlib import Path

import isthmus
from isthmus.api.observer import StepDone
from tests.runtime.commands import devices_of

KILLED = 12
DOCUMENTS = ("fleet.json", "job.json", "plan.json", "plans.json", "summary.json")
LINES = ("events.jsonl", "losses.jsonl", "predicted.jsonl", "trace.jsonl")
FLEET = """
name = "six"
[[device]]
name = "home"
region = "home"
compute = "250 MFLOPS"
memory = "2 GiB"
count = 2
[[device]]
name = "office"
region = "office"
compute = "400 MFLOPS"
memory = "2 GiB"
count = 2
[[device]]
name = "cloud"
region = "cloud"
compute = "600 MFLOPS"
memory = "2 GiB"
count = 2
[links]
intra = { latency = "0.5 ms", bandwidth = "1 Gbit/s" }
[[link]]
from = "home"
to = "office"
latency = "10 ms"
bandwidth = "40 Mbit/s"
[[link]]
from = "office"
to = "cloud"
latency = "30 ms"
bandwidth = "20 Mbit/s"
[[link]]
from = "home"
to = "cloud"
latency = "60 ms"
bandwidth = "10 Mbit/s"
"""
JOB = """
name = "recorded"
fleet = "FLEET"
planner = "even"
metrics = ["accuracy", "perplexity"]
[model]
name = "gpt"
options = {vocab_size = 256, sequence_length = 32, width = 64, layers = 4, heads = 4}
[data]
kind = "text"
options = {files = "stdlib", sequence_length = 32, max_bytes = 200000}
[training]
steps = 24
batch_size = 16
micro_batches = 8
clip_norm = 1.0
eval_every = 8
eval_samples = 32
save_every = 8
[[optimizer]]
name = "adamw"
lr = 3e-3
"""


class Killer(isthmus.Observer):
    def stepped(self, done: StepDone) -> None:
        print(f"step {done.step}")
        if done.step == KILLED and "home-1" in devices_of(os.getpid()):
            os.kill(devices_of(os.getpid())["home-1"], signal.SIGKILL)

    def note(self, text: str) -> None:
        print(text)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fleet.toml").write_text(FLEET)
        (folder / "job.toml").write_text(JOB.replace("FLEET", str(folder / "fleet.toml")))
        run = isthmus.train(folder / "job.toml", run=folder / "recorded", observer=Killer())
        document = (run.path / "job.json").read_text().replace(str(folder), ".")
        (run.path / "job.json").write_text(document)
        with zipfile.ZipFile(Path(__file__).parent / "recorded.zip", "w", zipfile.ZIP_DEFLATED) as kept:
            for file in (*DOCUMENTS, *LINES):
                kept.write(run.path / file, file)


if __name__ == "__main__":
    main()
