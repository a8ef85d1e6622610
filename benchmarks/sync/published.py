"""DreamDDP's published profiles and the shapes of its models in the simulator: a real WFBP against `dream`.

`python benchmarks/sync/published.py [--json PATH]`

8 and 16 workers are measured profiles; 32 is the 16-worker profile with a ring's bytes, 2 (K - 1) / K. WFBP sends
gradients in buckets while backward goes on, as `every-step` does: best of three bucket sizes; ASC-WFBP sends planned
ones, two at once; `s-sgd` begins when backward is over. `dreamddp` is the paper's search. The last table shows what
helps where communication is more than a period of computation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "dream"))

from shapes import MODELS, model_times, problem_of, published  # pyright: ignore[reportMissingImports]

from isthmus.planners.sync import plan_sync
from isthmus_testing.sync_modes import SyncChoices, SyncedLayer, SyncedModel, simulate_sync

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import options_of, write_figures

LATEST = Path(__file__).parent / "results" / "published.json"
PERIOD = 5
LATENCY_S = 5e-5
"""What merging messages saves; the profiles do not tell it apart. A tenth of their smallest averages."""
BUCKETS = (1, 1 << 20, 25 << 20)
BANDWIDTHS = {"100 MB/s": 100e6, "1 GB/s": 1e9}
SCHEDULED = (
    ("partial", "equal-number", False),
    ("dreamddp", "dream-dfs", False),
    ("dream", "dream", True),
    ("dream-spread", "dream-spread", True),
)
"""Name, planner, and whether averages reach into the next forward."""
EXTRAPOLATED = (31 / 32) / (15 / 16)
COMPRESSED = {"int8": 1 / 4, "sparse2bit": 1 / 100}
"""Bytes of a delta against float32's."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    workers: str
    compute_s: float
    wire_s: float
    """Averaging everything once."""
    step_s: dict[str, float]
    bound_s: float
    hard: dict[str, float]
    """Step where fewer bytes or more delay help: `streaming` with a delay, codecs."""


def cases() -> Iterator[tuple[str, str, list[float], list[float]]]:
    for profile in published().profiles:
        workers = "8" if " 8 workers" in profile.name else "16"
        backward_s, average_s = list(profile.backward_s), list(profile.average_s)
        yield profile.name, workers, backward_s, average_s
        if workers == "16":
            name = profile.name.replace("16 workers", "32 workers")
            yield name, "32 (extrapolated)", backward_s, [s * EXTRAPOLATED for s in average_s]
    for name in MODELS:
        for text, bandwidth in BANDWIDTHS.items():
            backward_s, average_s = model_times(name, bandwidth)
            yield f"{name} (shape), {text}", "32", backward_s, average_s


def model_of(backward_s: list[float], average_s: list[float], share: float = 1.0) -> SyncedModel:
    """Backward order; a forward takes half the backward, as in benchmarks/dream."""
    layers = tuple(
        SyncedLayer(name=f"layer-{n}", forward_s=b / 2, backward_s=b, average_s=share * a, size_bytes=int(a * 1e9))
        for n, (b, a) in reversed(list(enumerate(zip(backward_s, average_s, strict=True))))
    )
    least_s = min((a for a in average_s if a > 0), default=0.0)
    return SyncedModel(forward_s=0.0, layers=layers, latency_s=min(LATENCY_S, least_s), period=PERIOD)


def measure(name: str, workers: str, backward_s: list[float], average_s: list[float]) -> Result:
    model = model_of(backward_s, average_s)
    step_s = {
        "s-sgd": simulate_sync("s-sgd", model, SyncChoices()),
        "asc-wfbp": simulate_sync("asc-wfbp", model, SyncChoices()),
        "every-step": min(simulate_sync("every-step", model, SyncChoices(bucket_bytes=b)) for b in BUCKETS),
        "local": simulate_sync("local", model, SyncChoices()),
        "streaming": simulate_sync("streaming", model, SyncChoices()),
    }
    for mode, planner, overlap in SCHEDULED:
        plan = plan_sync(planner, problem_of(backward_s, average_s, PERIOD, overlap=overlap))
        step_s[mode] = simulate_sync("dream", model, SyncChoices(plan=plan, forward_overlap=overlap))
    hard: dict[str, float] = {}
    for delay in (1, 4):
        hard[f"streaming, delay {delay}"] = simulate_sync("streaming", model, SyncChoices(delay=delay))
        for codec, share in COMPRESSED.items():
            small = model_of(backward_s, average_s, share)
            hard[f"streaming, delay {delay}, {codec}"] = simulate_sync("streaming", small, SyncChoices(delay=delay))
    return Result(
        name=name,
        workers=workers,
        compute_s=model.compute_s,
        wire_s=sum(average_s),
        step_s=step_s,
        bound_s=model.bound_s,
        hard=hard,
    )


def table(results: list[Result]) -> Table:
    modes = list(results[0].step_s)
    drawn = Table("", "workers", "compute", "wire", *modes, "bound", title=f"Milliseconds per step, H = {PERIOD}")
    drawn.add_column("WFBP / dream", justify="right")
    drawn.add_column("ASC-WFBP / dreamddp", justify="right")
    drawn.add_column("local / dream", justify="right")
    for r in results:
        dream_s = r.step_s["dream"]
        drawn.add_row(
            r.name,
            r.workers,
            _ms(r.compute_s),
            _ms(r.wire_s),
            *[_ms(r.step_s[mode]) for mode in modes],
            _ms(r.bound_s),
            f"{r.step_s['every-step'] / dream_s:.2f}",
            f"{r.step_s['asc-wfbp'] / r.step_s['dreamddp']:.2f}",
            f"{r.step_s['local'] / dream_s:.2f}",
        )
    return drawn


def hard_table(results: list[Result]) -> Table:
    names = list(results[0].hard)
    drawn = Table("", "workers", "dream", *names, title="Where wire time exceeds H x computation")
    for r in results:
        if r.wire_s > PERIOD * r.compute_s:
            drawn.add_row(r.name, r.workers, _ms(r.step_s["dream"]), *[_ms(r.hard[name]) for name in names])
    return drawn


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def main() -> int:
    parser = options_of(__doc__, LATEST)
    options = parser.parse_args()
    results = [measure(*case) for case in cases()]
    write_figures(options.json, results)
    console = Console(width=240)
    console.print(table(results))
    console.print(hard_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
