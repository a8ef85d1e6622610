"""Codecs: bytes per element, and how fast they encode and decode beside torch.topk and copying memory.

`python benchmarks/compression/run.py [--quick] [--device cpu] [--json PATH]`

One thread, float32. GB/s are of the tensor as it is, 4 bytes for each element, whatever is sent. Each time is the best
of several. Ends with 1 where selecting the top 1 % is not three times as fast as torch.topk at ten million
elements, or where a payload is not of the size that a plan states.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from isthmus.plans import Packing
from isthmus.training.compression import Bf16, Codec, Int4, Int8, NoCodec, Sparse2Bit, TopK
from isthmus.training.compression.selection import largest

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine, options_of, write_figures

LATEST = Path(__file__).parent / "results" / "latest.json"
SIZES = (10**5, 10**6, 10**7, 10**8)
QUICK_SIZES = (10**5, 10**6)
CODECS: tuple[Codec, ...] = (NoCodec(), Bf16(), Int8(), Int4(), TopK(10.0), TopK(100.0), TopK(1000.0), Sparse2Bit(32.0))
SHARE = 100
"""Selection keeps one in so many."""
JUDGED, LEAST_GAIN = 10**7, 3.0
BUDGET_ELEMENTS = 3 * 10**8
"""Runs per figure: as many as this makes of the size, from 3 to 30."""


class CodecFigures(msgspec.Struct, frozen=True, kw_only=True):
    codec: str
    ratio: float
    elements: int
    bytes_per_element: float
    bytes_per_kept: float
    as_planned: bool
    """Whether the payload has the bytes that a plan states."""
    encode_s: float
    decode_s: float


class SelectionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The largest 1 % of a tensor."""

    values: str
    elements: int
    ours_s: float
    torch_topk_s: float

    @property
    def gain(self) -> float:
        return self.torch_topk_s / self.ours_s


class Report(msgspec.Struct, frozen=True, kw_only=True):
    when: str
    host: str
    device: str
    torch: str
    copy_s: dict[str, float]
    """By number of elements: into memory that is there already."""
    clone_s: dict[str, float]
    """Into new memory, which every codec needs too."""
    codecs: tuple[CodecFigures, ...]
    selections: tuple[SelectionFigures, ...]

    @property
    def good(self) -> bool:
        judged = [s.gain for s in self.selections if s.elements == JUDGED]
        return all(c.as_planned for c in self.codecs) and all(gain >= LEAST_GAIN for gain in judged)


def best_s(call: Callable[[], object], elements: int, device: str) -> float:
    found: list[float] = []
    for _ in range(max(3, min(30, BUDGET_ELEMENTS // elements))):
        start_s = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start_s)
    return min(found)


def tensors(elements: int, device: str) -> dict[str, Tensor]:
    """What selection meets: gradients without and with a heavy tail, and activations after a ReLU."""
    normal = torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(device)
    return {"normal": normal, "heavy tail": normal.sign() * torch.exp(3 * normal.abs()), "relu": normal.relu()}


def measure_codec(codec: Codec, x: Tensor, device: str) -> CodecFigures:
    elements, ratio = x.numel(), codec.ratio if isinstance(codec, TopK | Sparse2Bit) else 1.0
    payload = codec.encode(x)
    planned = Packing(codec=codec.name, ratio=ratio).wire_bytes(elements)
    return CodecFigures(
        codec=codec.name,
        ratio=ratio,
        elements=elements,
        bytes_per_element=payload.numel() / elements,
        bytes_per_kept=payload.numel() / elements * ratio,
        as_planned=payload.numel() == planned,
        encode_s=best_s(lambda: codec.encode(x), elements, device),
        decode_s=best_s(lambda: codec.decode(payload, x.shape, x.dtype), elements, device),
    )


def measure_selection(name: str, x: Tensor, device: str) -> SelectionFigures:
    count = x.numel() // SHARE
    return SelectionFigures(
        values=name,
        elements=x.numel(),
        ours_s=best_s(lambda: largest(x, count), x.numel(), device),
        torch_topk_s=best_s(lambda: x.abs().topk(count, sorted=False), x.numel(), device),
    )


def measure(sizes: tuple[int, ...], device: str) -> Report:
    copies, clones = dict[str, float](), dict[str, float]()
    codecs, selections = list[CodecFigures](), list[SelectionFigures]()
    for elements in sizes:
        print(f"{elements:,} elements ...", file=sys.stderr)
        drawn = tensors(elements, device)
        x, place = drawn["normal"], torch.empty(elements, device=device)
        copies[str(elements)] = best_s(lambda place=place, x=x: place.copy_(x), elements, device)
        clones[str(elements)] = best_s(x.clone, elements, device)
        codecs += [measure_codec(codec, x, device) for codec in CODECS]
        selections += [measure_selection(name, values, device) for name, values in drawn.items()]
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU, one thread"
    return Report(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        host=machine(),
        device=name,
        torch=str(torch.__version__),
        copy_s=copies,
        clone_s=clones,
        codecs=tuple(codecs),
        selections=tuple(selections),
    )


def table(found: Report) -> Table:
    drawn = Table("elements", "codec", title=f"Codecs on {found.device}, GB/s of float32")
    for heading in ("bytes / element", "bytes / kept", "encode", "decode", "both", "new copy", "copy"):
        drawn.add_column(heading, justify="right")
    for c in found.codecs:
        size = 4 * c.elements / 1e9
        drawn.add_row(
            f"{c.elements:,}",
            c.codec + (f" {c.ratio:g}" if c.ratio > 1 else ""),
            f"{c.bytes_per_element:.4f}",
            f"{c.bytes_per_kept:.2f}",
            f"{size / c.encode_s:.2f}",
            f"{size / c.decode_s:.2f}",
            f"{size / (c.encode_s + c.decode_s):.2f}",
            f"{size / found.clone_s[str(c.elements)]:.1f}",
            f"{size / found.copy_s[str(c.elements)]:.1f}",
            end_section=c.codec == CODECS[-1].name,
        )
    return drawn


def selection_table(found: Report) -> Table:
    drawn = Table("elements", "values", title=f"Selecting the largest {1 / SHARE:.0%}")
    for heading in ("ours", "torch.topk", "gain", "ours, GB/s"):
        drawn.add_column(heading, justify="right")
    for s in found.selections:
        drawn.add_row(
            f"{s.elements:,}",
            s.values,
            f"{s.ours_s * 1e3:.2f} ms",
            f"{s.torch_topk_s * 1e3:.2f} ms",
            f"{s.gain:.1f}x",
            f"{4e-9 * s.elements / s.ours_s:.2f}",
        )
    return drawn


def main() -> int:
    parser = options_of(__doc__, LATEST, "up to a million elements only")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(QUICK_SIZES if options.quick else SIZES, options.device)
    write_figures(options.json, found)
    console = Console(width=120)
    console.print(table(found))
    console.print(selection_table(found))
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
