"""One round's aggregation: plain, masked, and by Flower's SecAgg+, each whole in one process without a network.

python benchmarks/secure_aggregation/run.py --quick     # the smallest case, without Flower
python benchmarks/secure_aggregation/run.py             # all; makes an environment with Flower
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from isthmus.federated.algorithms import ClientUpdate, Combine
from isthmus.federated.partial import PartialSum
from isthmus.federated.secure.masks import WEIGHTS
from isthmus.protocol.federated_planning import SecureRules
from isthmus.protocol.secure_site import neighbour_count, threshold_of
from isthmus_testing.secure_phase import SecurePhase, Step

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

HERE = Path(__file__).parent
FLOWER = Path(tempfile.gettempdir()) / "isthmus-secagg-peer"
VERSION = "flwr==1.42.0"
RETURNS: Mapping[str, Combine] = {"delta": "weighted_mean"}
SAMPLES = 100


class Case(msgspec.Struct, frozen=True, kw_only=True):
    sites: int
    numbers: int
    """Of an update."""
    lost: int = 0
    """Of so many sites one is lost after it dealt its shares; 0: none."""

    @property
    def shares(self) -> int:
        return neighbour_count(self.sites) + 1


CASES = (
    Case(sites=8, numbers=100_000),
    Case(sites=8, numbers=1_000_000),
    Case(sites=32, numbers=100_000),
    Case(sites=32, numbers=100_000, lost=8),
    Case(sites=100, numbers=100_000),
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of all sites and the coordinator together."""

    seconds: float
    """Of one core: other programs do not count."""
    up: int
    """Bytes to the coordinator, of all sites."""
    down: int
    """Bytes to all sites, the model left out."""


def partial_of(update: torch.Tensor, sites: int) -> PartialSum:
    partial = PartialSum(RETURNS)
    partial.begin(SAMPLES * sites, sites)
    partial.fold(0, ClientUpdate(values={"delta": update}), SAMPLES)
    return partial


def plain(case: Case, updates: list[torch.Tensor]) -> tuple[Figures, torch.Tensor]:
    """As sites send updates without masks: float32, folded by the coordinator."""
    begun = time.process_time()
    total = PartialSum(RETURNS)
    total.begin(SAMPLES * case.sites, case.sites)
    for client, update in enumerate(updates):
        if not is_lost(case, client):
            total.fold(client, ClientUpdate(values={"delta": update}), SAMPLES)
    sums = total.tensors()["delta"].clone()
    return Figures(seconds=time.process_time() - begun, up=4 * case.numbers * total.clients, down=0), sums


def is_lost(case: Case, client: int) -> bool:
    return bool(case.lost) and (client + 1) % case.lost == 0


def masked(case: Case, updates: list[torch.Tensor]) -> tuple[Figures, torch.Tensor]:
    begun = time.process_time()
    values = {
        f"site-{client:03}": {
            **partial_of(update, case.sites).tensors(),
            WEIGHTS: torch.tensor([SAMPLES << 20, 1]),
        }
        for client, update in enumerate(updates)
    }
    lost: dict[str, Step] = {name: "update" for client, name in enumerate(values) if is_lost(case, client)}
    phase = SecurePhase(values, SecureRules(), lost=lost)
    result = phase.run()
    assert result.sums is not None, result.reason
    figures = Figures(seconds=time.process_time() - begun, up=phase.bytes_up, down=phase.bytes_down)
    return figures, result.sums["delta"]


def flower(cases: tuple[Case, ...]) -> list[Figures]:
    if not (FLOWER / "done").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(FLOWER)], check=True)
        subprocess.run([str(FLOWER / "bin" / "pip"), "install", "-q", VERSION], check=True)
        (FLOWER / "done").touch()
    asked = [
        {
            "sites": case.sites,
            "numbers": case.numbers,
            "shares": case.shares,
            "threshold": threshold_of(case.shares, 0.5),
            "lost": case.lost,
        }
        for case in cases
    ]
    lines = b"\n".join(map(msgspec.json.encode, asked)) + b"\n"
    command = [str(FLOWER / "bin" / "python"), str(HERE / "flower_side.py")]
    ran = subprocess.run(command, input=lines, stdout=subprocess.PIPE, check=True)
    found = [msgspec.json.decode(line) for line in ran.stdout.splitlines()]
    return [
        # Flower sends the model with the shares: it is left out, as ours is.
        Figures(seconds=f["seconds"], up=f["up"], down=f["down"] - 4 * case.numbers * case.sites)
        for f, case in zip(found, cases, strict=True)
    ]


def main() -> None:
    parser = options_of(__doc__, HERE / "results" / "latest.json", "the smallest case, without Flower")
    options = parser.parse_args()
    cases = CASES[:1] if options.quick else CASES
    torch.set_num_threads(1)
    peers = [None] * len(cases) if options.quick else flower(cases)
    table = Table("sites", "numbers", "lost", "neighbours", "", "CPU s", "a site", "KB up a site", "KB down a site")
    rows: list[dict[str, object]] = []
    for case, peer in zip(cases, peers, strict=True):
        draws = torch.Generator().manual_seed(0)
        updates = [torch.randn(case.numbers, generator=draws) for _ in range(case.sites)]
        without, sums = plain(case, updates)
        under, same = masked(case, updates)
        assert torch.equal(sums, same), "the sums are the same, bit for bit"
        for name, figures in (("plain", without), ("masked", under), ("Flower SecAgg+", peer)):
            if figures is None:
                continue
            rows.append({"case": case, "side": name, "figures": figures})
            lost = f"1 of {case.lost}" if case.lost else "none"
            table.add_row(
                str(case.sites),
                f"{case.numbers:,}",
                lost,
                str(case.shares - 1),
                name,
                f"{figures.seconds:.3f}",
                f"{1000 * figures.seconds / case.sites:.1f} ms",
                f"{figures.up / case.sites / 1000:.1f}",
                f"{figures.down / case.sites / 1000:.1f}",
            )
    Console(width=120).print(table)
    write_figures(options.json, {"machine": machine(), "flower": VERSION, "rows": rows})


if __name__ == "__main__":
    main()
