"""The whole way of a large model: ten steps over four device processes, a kill, a resume, an export, transformers.

`python benchmarks/large_models/whole.py [--case "0.12 B in full"] [--sequence 32] [--folder PATH]`

By hand: it takes from minutes to an hour.

A Qwen3 of random bfloat16 values, which transformers has saved once, is trained by `isthmus train` in four runs of the
same job:

| run | |
|---|---|
| plain | nothing happens to it |
| coordinator | its coordinator gets SIGKILL after the seventh step; `--resume` goes on from the fifth's checkpoint |
| device | one of its devices gets SIGKILL after the seventh step, and the run goes on by itself |
| both | the same, and its coordinator gets SIGKILL when the devices that are left have a new plan; `--resume` |

Of each the losses of all steps and every tensor of the last checkpoint, the optimizer's too, are held against those of
the first, bit for bit. Then the run of the coordinator is exported, loaded by transformers, and its logits are held
against those of the run's own module with the checkpoint's weights. Peaks are VmHWM of each process. Linux.

With `--folder` each command that has ended is kept, and the next time it goes on from there.

Exit code 1: something is not equal.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from isthmus.api.folder import RunFolder
from isthmus.api.run_entries import ENTRIES
from isthmus.models import build_model, merged
from isthmus.run_files import CHECKPOINTS, LOSSES
from isthmus.training.checkpoint import checkpoint_files, digest_of, latest_checkpoint, load_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "whole.json"
STEPS, SAVED, KILLED = 10, 5, 7
RUNS = {
    "plain": (),
    "coordinator": ("coordinator",),
    "device": ("device d-2",),
    "both": ("device d-2", "coordinator"),
}
CASES = ("0.12 B in full", "0.12 B with LoRA", "0.6 B in full", "1.7 B with LoRA")
FLEET = """
name = "four"
[[device]]
name = "d"
region = "here"
compute = "20 GFLOPS"
memory = "16 GiB"
count = 4
[links]
intra = { latency = "100 us", bandwidth = "10 Gbit/s" }
"""
JOB = """
name = "whole"
fleet = "fleet.toml"
planner = "even"
[model]
name = "hf"
options = {{ path = "{model}", task = "causal-lm" }}
{lora}
[data]
kind = "text"
options = {{ files = "stdlib", sequence_length = {sequence}, shift_labels = false, max_bytes = 60000 }}
[training]
steps = {steps}
batch_size = 2
micro_batches = 2
precision = "bf16"
save_every = {saved}
[[optimizer]]
name = "adamw"
lr = 1e-4
fused = true
[runtime]
emulate = false
snapshots = false
timeout = "300 s"
"""


class Session(msgspec.Struct, frozen=True):
    """One command."""

    seconds: float
    peaks_kb: dict[str, int]  # by the process's title


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """One run, with its resume."""

    run: str
    seconds: float
    coordinator_mb: float
    devices_mb: dict[str, float]
    losses: dict[int, float]
    digest: str  # of the last checkpoint's tensors, by name
    checkpoint_mb: float


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """An export's logits, float32, against those of the run's own module."""

    export: str
    seconds: float
    peak_mb: float
    against: str
    equal: bool
    most_apart: float
    largest: float  # of the logits


class Case(msgspec.Struct, frozen=True, kw_only=True):
    case: str
    sequence: int
    file_mb: float
    checkpoint_mb: float
    runs: tuple[Ran, ...]
    exports: tuple[Compared, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    cases: tuple[Case, ...]


# Each of the following is in a process of its own: `--part NAME ARGUMENT ...`.


def digest(run: str) -> None:
    print(digest_of(checkpoint_files(latest_checkpoint(Path(run) / CHECKPOINTS))))


def logits(out: str, kind: str, run: str, export: str, base: str) -> None:
    """Of one model in memory: as transformers (and peft) load the export, or the run's own module."""
    if kind == "theirs":
        module: Any = transformers.AutoModelForCausalLM.from_pretrained(base or export)
        module = peft.PeftModel.from_pretrained(module, export) if base else module
    else:
        module = build_model(RunFolder(Path(run)).job().model)
        load_checkpoint(module, latest_checkpoint(Path(run) / CHECKPOINTS))
        module = merged(module) if kind == "own merged" else module
    ids = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        save_file({"logits": module.eval()(input_ids=ids).logits.float().contiguous()}, out)


def apart(ours: str, theirs: str) -> None:
    a, b = load_file(ours)["logits"], load_file(theirs)["logits"]
    print((a - b).abs().max().item(), a.abs().max().item(), sep="\n")


PARTS = {"digest": digest, "logits": logits, "apart": apart}


def part(name: str, *arguments: object) -> list[str]:
    command = [sys.executable, __file__, "--part", name, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


class Peaks:
    """The most memory of a process and of those under it, by name, as long as they live."""

    def __init__(self) -> None:
        self.kb: dict[str, int] = {}
        self.pids: dict[str, int] = {}

    def look(self, coordinator: int) -> None:
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(path.parent.name))
        found = [coordinator]
        for pid in found:
            found += children.get(pid, [])
            self._keep(pid, "coordinator" if pid == coordinator else "")

    def _keep(self, pid: int, name: str) -> None:
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            rows = Path(f"/proc/{pid}/status").read_text().splitlines()
            kb = int(next(row for row in rows if row.startswith("VmHWM")).split()[1])
        except (OSError, StopIteration):
            return  # it has ended
        name = name or (title.removeprefix("isthmus ") if title.startswith("isthmus ") else "other")
        self.kb[name] = max(kb, self.kb.get(name, 0))
        self.pids[name] = pid


def losses_of(run: Path) -> dict[int, float]:
    path = run / LOSSES
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
    return {line["step"]: line["loss"] for line in lines}


def plans_of(run: Path) -> int:
    path = run / ENTRIES
    return path.read_bytes().count(b'"kind":"planned"') if path.is_file() else 0


def watched(command: list[str], folder: Path, peaks: Peaks, run: Path, strikes: tuple[str, ...] = ()) -> int:
    """Run it to its end, and kill the first of `strikes` after the seventh step, another when there is a second plan.
    No device outlives its coordinator."""
    left = list(strikes)
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                peaks.look(process.pid)
                due = len(losses_of(run)) >= KILLED if len(left) == len(strikes) else plans_of(run) > 1
                if left and due:
                    who = left.pop(0)
                    os.kill(process.pid if who == "coordinator" else peaks.pids[who], signal.SIGKILL)
                time.sleep(0.2 if len(left) == len(strikes) else 0.02)
        finally:
            process.kill()  # this program is interrupted
            process.wait()
    ends_s = time.monotonic() + 60
    while here := [name for name, pid in peaks.pids.items() if is_alive(pid)]:
        if time.monotonic() > ends_s:
            raise SystemExit(f"still there a minute after their coordinator: {', '.join(here)}")
        time.sleep(0.2)
    return process.returncode


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def session(folder: Path, name: str, strikes: tuple[str, ...], *more: str) -> Session:
    """One command, to its end. Its figures are kept: it is not made again."""
    kept, peaks, began_s = folder / f"{name}{'-'.join(more)}.json", Peaks(), time.monotonic()
    if not kept.exists():
        if not more:
            shutil.rmtree(folder / name, ignore_errors=True)
        command = [sys.executable, "-m", "isthmus", "train", "job.toml", "--run", name, *more]
        code = watched(command, folder, peaks, folder / name, strikes)
        if code != (-signal.SIGKILL if "coordinator" in strikes else 0):
            raise SystemExit(f"{name}: exit code {code}\n" + (folder / "log.txt").read_text()[-4000:])
        kept.write_bytes(msgspec.json.encode(Session(time.monotonic() - began_s, peaks.kb)))
        print(kept, kept.read_text(), flush=True)
    return msgspec.json.decode(kept.read_bytes(), type=Session)


def train(folder: Path, name: str) -> Ran:
    run, strikes = folder / name, RUNS[name]
    sessions = [session(folder, name, strikes)]
    if "coordinator" in strikes:
        sessions.append(session(folder, name, (), "--resume"))
    peaks: dict[str, int] = {}
    for title in {title for one in sessions for title in one.peaks_kb}:
        peaks[title] = max(one.peaks_kb.get(title, 0) for one in sessions)
    newest = max((run / CHECKPOINTS).glob("step-*"))
    return Ran(
        run=name,
        seconds=sum(one.seconds for one in sessions),
        coordinator_mb=peaks.pop("coordinator") / 1e3,
        devices_mb={title: kb / 1e3 for title, kb in sorted(peaks.items())},
        losses=losses_of(run),
        digest=part("digest", run)[0],
        checkpoint_mb=sum(path.stat().st_size for path in newest.iterdir()) / 1e6,
    )


def export(folder: Path, options: list[str], kind: str, base: str, cached: dict[str, Path]) -> Compared:
    run, out, peaks = folder / "coordinator", folder / "exported", Peaks()
    shutil.rmtree(out, ignore_errors=True)
    began_s = time.monotonic()
    if watched([sys.executable, "-m", "isthmus", "export", str(run), str(out), *options], folder, peaks, run):
        raise SystemExit((folder / "log.txt").read_text()[-4000:])
    seconds = time.monotonic() - began_s
    if kind not in cached:
        cached[kind] = folder / f"{kind}.safetensors"
        part("logits", cached[kind], kind, run, "", "")
    part("logits", folder / "theirs.safetensors", "theirs", run, out, base)
    most, largest = map(float, part("apart", cached[kind], folder / "theirs.safetensors"))
    return Compared(
        export=" ".join(options) or "as it is",
        seconds=seconds,
        peak_mb=peaks.kb["coordinator"] / 1e3,
        against=kind,
        equal=most == 0,
        most_apart=most,
        largest=largest,
    )


def whole(case: str, folder: Path, sequence: int) -> Case:
    size, _, how = case.partition(" B ")
    model, lora = folder / "model", how == "with LoRA"
    if not (model / "config.json").exists():
        start = [sys.executable, str(Path(__file__).with_name("start.py")), "--save", size, str(model)]
        subprocess.run(start, check=True, stdout=subprocess.PIPE)
    (folder / "fleet.toml").write_text(FLEET)
    table = "[model.lora]\nr = 8" if lora else ""
    (folder / "job.toml").write_text(JOB.format(model=model, lora=table, steps=STEPS, saved=SAVED, sequence=sequence))
    runs: list[Ran] = []
    for name in RUNS:
        kept = folder / f"{name}-run.json"
        if not kept.exists():
            kept.write_bytes(msgspec.json.encode(train(folder, name)))
            print(case, kept.read_text(), flush=True)
            if name != "coordinator":  # which is exported
                shutil.rmtree(folder / name / CHECKPOINTS)
        runs.append(msgspec.json.decode(kept.read_bytes(), type=Ran))
    cached: dict[str, Path] = {}
    wanted = [(["--max-shard-size", "500MB"], "own", "")]
    if lora:
        wanted = [([], "own", str(model)), (["--merge"], "own merged", ""), (["--merge"], "own", "")]
    exports = [export(folder, options, kind, base, cached) for options, kind, base in wanted]
    return Case(
        case=case,
        sequence=sequence,
        file_mb=sum(path.stat().st_size for path in model.glob("*.safetensors")) / 1e6,
        checkpoint_mb=runs[0].checkpoint_mb,
        runs=tuple(runs),
        exports=tuple(exports),
    )


def is_whole(case: Case) -> bool:
    first, *others = case.runs
    same = all((run.losses, run.digest) == (first.losses, first.digest) for run in others)
    # What an adapter adds is rounded when it is added to weights of bfloat16: of a merged one no bits are asked.
    rounded = [c for c in case.exports if "--merge" in c.export and c.against == "own"]
    return same and len(first.losses) == STEPS and all(c.equal for c in case.exports if c not in rounded)


def show(case: Case) -> None:
    table = Table(title=f"{case.case}: file {case.file_mb:.0f} MB, checkpoint {case.checkpoint_mb:.0f} MB")
    for title in ("run", "seconds", "coordinator MB", "devices MB", "losses", "tensors"):
        table.add_column(title)
    first = case.runs[0]
    for run in case.runs:
        equal = ["equal" if same else "OTHERS" for same in (run.losses == first.losses, run.digest == first.digest)]
        devices = ", ".join(f"{mb:.0f}" for name, mb in run.devices_mb.items() if name.startswith("device "))
        table.add_row(run.run, f"{run.seconds:.0f}", f"{run.coordinator_mb:.0f}", devices, *equal)
    Console(width=120).print(table)
    for c in case.exports:
        print(f"export {c.export}: {c.seconds:.0f} s, peak {c.peak_mb:.0f} MB, against {c.against}: ", end="")
        print("equal" if c.equal else f"at most {c.most_apart:.3g} apart, of {c.largest:.3g}", flush=True)


def main() -> None:
    parser = options_of(__doc__, LATEST)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--folder", type=Path, help="where everything is written, and left")
    parser.add_argument("--sequence", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--part", nargs="+")
    options = parser.parse_args()
    if options.part:
        PARTS[options.part[0]](*options.part[1:])
        return
    found: list[Case] = []
    for case in options.case or CASES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.folder or Path(temporary)) / case.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            found.append(whole(case, folder.resolve(), options.sequence))
            show(found[-1])
    write_figures(options.json, Report(when=datetime.now(UTC).isoformat(), host=machine(), cases=tuple(found)))
    sys.exit(0 if all(map(is_whole, found)) else 1)


if __name__ == "__main__":
    main()
