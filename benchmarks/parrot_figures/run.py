"""FedML Parrot's figures 7, 9, 10 and 4d on the virtual clock, on its clusters; and the clock against a real run.

`python benchmarks/parrot_figures/run.py [--quick] [--only 9] [--json PATH]`

No client is trained but for counting: a federated job with `fleet = "parrot-a"` is simulated, as `isthmus simulate`
does it. Times are FLOPs over the cards' peak, so they are lower bounds of the paper's; what can be compared are ratios.
At the end a small job on three emulated devices is run by processes of this machine and simulated.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import matplotlib as mpl
import msgspec
from resnets import Images
from rich.console import Console
from rich.table import Table

from isthmus import FederatedJob
from isthmus.api.rounds import simulate_rounds
from isthmus.data import DataSpec
from isthmus.data.partition import PartitionSpec
from isthmus.experiments import FederatedRun, RoundLine
from isthmus.federated.client_costs import ClientCosts, client_costs
from isthmus.federated.job import FederatedConfig, FederatedRuntime
from isthmus.federated.local import FederatedTraining
from isthmus.models import ModelSpec
from isthmus.programs.open_phase import RoundRecord
from isthmus.protocol.federated_participation import Participation

mpl.use("Agg")
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
PICTURE = HERE / "results" / "figures.png"
FLEET = "parrot-a"
EXECUTORS = (4, 8, 16, 32)
ROUNDS, SKIPPED = 12, 4
"""The first rounds are scheduled without knowing the executors."""
ALGORITHMS = ("fedavg", "fedprox", "fednova", "mime", "scaffold", "feddyn")
FIGURES = ("7", "9", "10", "4d")
FIGURE_4D_EXECUTORS = 8
"""The paper does not say how many."""
FIGURE_9_ETA = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
"""Of eight cards, where they are made unequal: a card sleeps so many times what it computes. The paper gives none."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the paper's Table 4. Sizes of clients are log-normal."""

    name: str
    network: str
    shape: tuple[int, ...]
    clients: int
    mean: float
    deviation: float
    epochs: dict[int, int]
    """By clients a round."""

    def job(self, execution: dict[str, object], per_round: int, algorithm: str, fleet: str) -> FederatedJob:
        sizes: dict[str, object] = {
            "writers": self.clients,
            "mean": self.mean,
            "deviation": self.deviation,
            "largest": 100_000,
        }
        return FederatedJob(
            name="parrot-figures",
            model=ModelSpec(name=f"resnets:{self.network}"),
            data=DataSpec(kind="femnist", options=sizes),
            federated=FederatedConfig(
                algorithm=algorithm, rounds=ROUNDS, participation=Participation(clients=per_round)
            ),
            training=FederatedTraining(epochs=self.epochs[per_round], eval_every=0),
            runtime=msgspec.convert(execution, FederatedRuntime),
            fleet=fleet,
        )


FEMNIST = Workload(
    name="FEMNIST",
    network="resnet18",
    shape=(1, 28, 28),
    clients=3400,
    mean=226.83,
    deviation=88.94,
    epochs={100: 10, 1000: 10},
)
IMAGENET = Workload(
    name="ImageNet",
    network="resnet50",
    shape=(3, 224, 224),
    clients=10_000,
    mean=128.12,
    deviation=17.1,
    epochs={100: 2, 1000: 1},
)
"""1,281,167 images of 1,000 classes by Dirichlet(0.1): a class gives a client 0.128 images with deviation 0.54, its
share's and the drawing's together, so a client has 128 with deviation 17."""
SCHEMES: dict[str, dict[str, object]] = {
    "fa": {"scheme": "fa"},
    "parrot without scheduling": {"scheme": "parrot", "planner": "uniform"},
    "parrot": {"scheme": "parrot"},
    "ours": {"scheme": "ours"},
}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    figure: str
    workload: str
    algorithm: str
    scheme: str
    per_round: int
    executors: int
    round_s: float
    """Mean over the rounds after the first ones."""
    messages: float
    """With sums, a round."""
    wall_s: float
    """That the simulation took here."""
    fleet: str = FLEET


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """A run of processes on this machine, and its simulation."""

    rounds: int
    executors: int
    run_s: list[float]
    simulated_s: list[float]
    same_clients: bool
    """Every executor trained the same clients in every round."""

    @property
    def off(self) -> float:
        """Median over the rounds of simulated over run, less 1."""
        return statistics.median(s / r for s, r in zip(self.simulated_s, self.run_s, strict=True)) - 1


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    machine: str
    counting_s: float
    cells: list[Cell]
    clocks: Clocks | None


class Bench:
    """Counts the costs of each model, algorithm and number of epochs once."""

    def __init__(self, console: Console, folder: Path) -> None:
        self._console = console
        self._folder = folder
        self._counted: dict[tuple[str, str, int], ClientCosts] = {}
        self.counting_s = 0.0
        self.cells: list[Cell] = []

    def costs(self, workload: Workload, job: FederatedJob) -> ClientCosts:
        key = (workload.network, job.federated.algorithm, job.local.epochs)
        if key not in self._counted:
            began_s = time.perf_counter()
            self._counted[key] = client_costs(job, Images(workload.shape))
            self.counting_s += time.perf_counter() - began_s
        return self._counted[key]

    def cell(
        self,
        figure: str,
        workload: Workload,
        scheme: str,
        *,
        per_round: int = 100,
        executors: int = 1,
        algorithm: str = "fedavg",
        fleet: str = FLEET,
    ) -> None:
        execution = SCHEMES.get(scheme, {"scheme": scheme}) | {"executors": executors}
        job = workload.job(execution, per_round, algorithm, fleet)
        costs = self.costs(workload, job)
        began_s = time.perf_counter()
        found = simulate_rounds(job, counted=costs)
        wall_s = time.perf_counter() - began_s
        steady = found.rounds[SKIPPED:]
        single = job.scheme.single
        messages = [sum(len(timed) if single else 1 for timed in r.record.trained.values() if timed) for r in steady]
        cell = Cell(
            figure=figure,
            workload=workload.name,
            algorithm=job.federated.algorithm,
            scheme=scheme,
            per_round=job.federated.participation.needed(workload.clients),
            executors=found.executors,
            round_s=statistics.fmean(r.seconds for r in steady),
            messages=0 if scheme == "sp" else statistics.fmean(messages),
            wall_s=wall_s,
            fleet=Path(fleet).stem,
        )
        self.cells.append(cell)
        self._console.print(
            f"{figure}: {cell.workload} {cell.algorithm} {scheme}, {cell.per_round} on {cell.executors}, "
            f"{cell.fleet}: {cell.round_s:.3f} s ({wall_s:.1f} s here)",
            highlight=False,
        )

    def one_card_each(self, devices: int) -> str:
        """A fleet file: the cluster's cards and network, a node for each card."""
        path = self._folder / f"cards-{devices}.toml"
        card = f'name = "card"\nregion = "nodes"\ncompute = "13.45 TFLOPS"\nmemory = "11 GB"\ncount = {devices}'
        links = 'intra = { latency = "0.1 ms", bandwidth = "10 Gbit/s" }'
        path.write_text(f'name = "cards"\n[[device]]\n{card}\n[links]\n{links}\n')
        return str(path)

    def figures(self, workload: Workload, wanted: Collection[str], *, quick: bool) -> None:
        if "7" in wanted:
            self.figure_7(workload, (4, 32) if quick else EXECUTORS)
        if "9" in wanted:
            self.figure_9(workload)
        if "10" in wanted:
            self.figure_10(workload, (8,) if quick else (8, 32))

    def figure_7(self, workload: Workload, executors: tuple[int, ...]) -> None:
        self.cell("7", workload, "sp")
        self.cell("7", workload, "sd", fleet=self.one_card_each(100))
        for count in executors:
            for scheme in SCHEMES:
                self.cell("7", workload, scheme, executors=count)

    def unequal_cards(self) -> str:
        """A fleet file: a card of the cluster on each of eight nodes, which all but the first slow down."""
        path = self._folder / "parrot-a-unequal.toml"
        card = 'memory = "11 GB"\ncompute = "{:g} GFLOPS"\nregion = "node-{}"\nname = "card-{}"'
        cards = (card.format(13450 / (1 + eta), k, k) for k, eta in enumerate(FIGURE_9_ETA))
        links = '[links]\ndefault = { latency = "0.1 ms", bandwidth = "10 Gbit/s" }'
        path.write_text("\n".join(['name = "unequal cards"', *(f"[[device]]\n{one}" for one in cards), links]))
        return str(path)

    def figure_9(self, workload: Workload) -> None:
        for fleet in (FLEET, self.unequal_cards(), "parrot-c"):
            for scheme in list(SCHEMES)[1:]:
                self.cell("9", workload, scheme, executors=len(FIGURE_9_ETA), fleet=fleet)

    def figure_10(self, workload: Workload, executors: tuple[int, ...]) -> None:
        for per_round in (100, 1000):
            for count in executors:
                for scheme in ("parrot without scheduling", "parrot"):
                    self.cell("10", workload, scheme, per_round=per_round, executors=count)

    def figure_4d(self, algorithms: tuple[str, ...]) -> None:
        for algorithm in algorithms:
            for scheme in ("parrot without scheduling", "parrot"):
                self.cell("4d", FEMNIST, scheme, executors=FIGURE_4D_EXECUTORS, algorithm=algorithm)


SMALL_FLEET = """
name = "three"
[[device]]
name = "slow"
region = "a"
compute = "20 MFLOPS"
memory = "1 GB"
[[device]]
name = "middle"
region = "b"
compute = "40 MFLOPS"
memory = "1 GB"
[[device]]
name = "fast"
region = "c"
compute = "80 MFLOPS"
memory = "1 GB"
[links]
default = { latency = "2 ms", bandwidth = "10 MB/s" }
"""


def clocks(folder: Path, rounds: int) -> Clocks:
    """Digits on three devices a thousand times as slow as a card: all of them together need a tenth of a core."""
    fleet = folder / "three.toml"
    fleet.write_text(SMALL_FLEET)
    job = FederatedJob(
        name="three-devices",
        model=ModelSpec(name="mlp", options={"features": 64, "width": 64, "layers": 1, "classes": 10}),
        data=DataSpec(kind="digits", options={"flat": True}),
        federated=FederatedConfig(
            rounds=rounds,
            partition=PartitionSpec(scheme="dirichlet", clients=40, alpha=1.0),
            participation=Participation(clients=20),
        ),
        training=FederatedTraining(epochs=4, eval_every=0),
        runtime=FederatedRuntime(scheme="parrot", executors=3),
        fleet=str(fleet),
    )
    lines: list[RoundLine] = []
    FederatedRun(job, folder / "run", resume=False, watch=lines.append).run()
    simulated = simulate_rounds(job).rounds
    return Clocks(
        rounds=len(lines),
        executors=3,
        run_s=[line.seconds for line in lines],
        simulated_s=[r.seconds for r in simulated],
        same_clients=[_who(line.record) for line in lines] == [_who(r.record) for r in simulated],
    )


def _who(record: RoundRecord) -> dict[str, list[int]]:
    return {name: [t.client for t in timed] for name, timed in sorted(record.trained.items())}


def main() -> None:
    parser = options_of(__doc__, LATEST, quick="FEMNIST alone, 4 and 32 devices, two algorithms; no picture")
    parser.add_argument("--only", choices=FIGURES, help="one figure; the file keeps its rows of the others")
    options = parser.parse_args()
    console = Console()
    quick: bool = options.quick
    wanted = [options.only] if options.only else list(FIGURES)
    before = (
        msgspec.json.decode(options.json.read_bytes(), type=Figures) if options.only and options.json.exists() else None
    )
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(console, Path(name))
        for workload in (FEMNIST,) if quick else (FEMNIST, IMAGENET):
            bench.figures(workload, wanted, quick=quick)
        if "4d" in wanted:
            bench.figure_4d(("fedavg", "scaffold") if quick else ALGORITHMS)
        compared = before.clocks if before and before.clocks else clocks(Path(name), 6 if quick else 12)
    console.print(table(bench.cells))
    cells = [*bench.cells, *(cell for cell in (before.cells if before else []) if cell.figure not in wanted)]
    counting_s = bench.counting_s + (before.counting_s if before else 0.0)
    console.print(
        f"{compared.rounds} rounds on three emulated devices: {sum(compared.run_s):.2f} s, simulated "
        f"{sum(compared.simulated_s):.2f} s, off {compared.off:+.1%}; same clients: {compared.same_clients}"
    )
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    figures = Figures(when=when, machine=machine(), counting_s=counting_s, cells=cells, clocks=compared)
    write_figures(options.json, figures)
    if not quick and not options.only:
        draw(bench.cells, PICTURE)
    if not compared.same_clients:
        sys.exit("the run and its simulation gave clients to other executors")


def table(cells: list[Cell]) -> Table:
    found = Table("figure", "workload", "fleet", "algorithm", "scheme", "clients", "executors", "round", "messages")
    for c in cells:
        round_s, messages = f"{c.round_s:.3f} s", f"{c.messages:g}"
        found.add_row(
            c.figure, c.workload, c.fleet, c.algorithm, c.scheme, str(c.per_round), str(c.executors), round_s, messages
        )
    return found


def draw(cells: list[Cell], path: Path) -> None:
    """Fig. 7 by workload, Fig. 10 and Fig. 4d as ratios: without scheduling over with it."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    for style, workload in zip(("-", "--"), ("FEMNIST", "ImageNet"), strict=True):
        for colour, scheme in enumerate(SCHEMES):
            row = [c for c in cells if (c.figure, c.workload, c.scheme) == ("7", workload, scheme)]
            label = f"{workload}, {scheme}"
            axes[0].plot(
                [c.executors for c in row], [c.round_s for c in row], style, marker="o", color=f"C{colour}", label=label
            )
    axes[0].set(title="Fig. 7: 100 clients a round", xlabel="devices", ylabel="seconds a round")
    axes[0].set_xscale("log", base=2)
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=6)
    for axis, number, title in ((axes[1], "10", "Fig. 10"), (axes[2], "4d", "Fig. 4d")):
        bars = ratios(cells, number)
        axis.barh(list(bars), list(bars.values()))
        axis.axvline(1.0, color="grey")
        axis.set(title=f"{title}: round without scheduling / with it")
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def ratios(cells: list[Cell], number: str) -> dict[str, float]:
    """By setting, Parrot's round without scheduling over its round."""
    found: dict[str, float] = {}
    both = [c for c in cells if c.figure == number]
    for without, with_ in zip(both[::2], both[1::2], strict=True):
        what = (
            without.algorithm if number == "4d" else f"{without.workload}, {without.per_round} on {without.executors}"
        )
        found[what] = without.round_s / with_.round_s
    return found


if __name__ == "__main__":
    main()
