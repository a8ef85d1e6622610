"""The pairs of (thinned fleet, model) that are predicted and measured. Fixed before anything is measured; all are
reported."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from isthmus.data import DataSpec
from isthmus.fleet import Fleet, resolve_fleet
from isthmus.job import Job, PlanConfig, RuntimeConfig, TrainingConfig
from isthmus.models import ModelSpec

Kind = Literal["emulated", "network"]
Shares = tuple[int, ...]
"""Parts of the model's FLOPs that the stages get, as near as the legal cuts allow."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    """emulated: compute stretched and links shaped to the fleet's figures. network: this host's own speed, over TCP
    between network namespaces."""
    fleet_name: str
    devices: int
    model: str
    options: dict[str, object]
    data: Literal["text", "digits", "sentence pairs"]
    sequence_length: int = 0
    micro_batch_size: int = 4
    micro_batches: int = 8
    slow: float = 1.0
    """Emulated devices are so many times slower than the fleet's: a V100 cannot be emulated on a laptop."""
    shares: Shares
    warmups: tuple[Shares, ...] = ()
    """Other cuts, run to calibrate the devices' speeds."""
    u_shaped: bool = False
    """Labels stay on the first device: it has the last stage too."""

    @property
    def name(self) -> str:
        return f"{self.fleet_name} x {self.devices}, {self.model}{', U-shaped' if self.u_shaped else ''}"

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.name}"

    @property
    def fleet(self) -> Fleet:
        fleet = resolve_fleet(self.fleet_name).thin(self.devices)
        devices = (msgspec.structs.replace(d, flops_per_s=d.flops_per_s / self.slow) for d in fleet.devices)
        return msgspec.structs.replace(fleet, devices=tuple(devices))

    def job(self, steps: int, folder: Path) -> Job:
        """`folder` holds the data that the benchmark writes itself."""
        return Job(
            name="prediction",
            model=ModelSpec(name=self.model, options=self.options),
            data=self._data(folder),
            training=TrainingConfig(
                steps=steps, batch_size=self.micro_batch_size * self.micro_batches, micro_batches=self.micro_batches
            ),
            plan=PlanConfig(data_holder=self.fleet.names[:1], labels_stay=True) if self.u_shaped else PlanConfig(),
            runtime=RuntimeConfig(timeout="120 s"),
        )

    def _data(self, folder: Path) -> DataSpec:
        match self.data:
            case "digits":
                return DataSpec(kind="digits", options={"size": 32})
            case "sentence pairs":
                return DataSpec(
                    kind="pairs", options={"path": str(write_pairs(folder)), "sequence_length": self.sequence_length}
                )
            case "text":
                return DataSpec(
                    kind="text",
                    options={
                        "files": "stdlib",
                        "sequence_length": self.sequence_length,
                        "max_bytes": 1_000_000,
                        "shift_labels": not self.model.startswith("hf-"),
                    },
                )


def write_pairs(folder: Path) -> Path:
    """Sentence pairs of MNLI's form. Their text does not matter to the time that they take."""
    path = folder / "pairs.jsonl"
    rows = (
        {"premise": f"sentence {i} says one thing", "hypothesis": f"and {i + 1} another", "label": i % 3}
        for i in range(2000)
    )
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    return path


SMALL_GPT: dict[str, object] = {"vocab_size": 256, "sequence_length": 64, "width": 64, "layers": 4, "heads": 4}
GPT: dict[str, object] = {"vocab_size": 256, "sequence_length": 128, "width": 128, "layers": 6, "heads": 4}
UNET: dict[str, object] = {"width": 16, "depth": 2}
BERT: dict[str, object] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
    "num_labels": 3,
}
GPT2: dict[str, object] = {"vocab_size": 256, "n_positions": 128, "n_embd": 128, "n_layer": 6, "n_head": 4}
LLAMA: dict[str, object] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}

PAIRS: tuple[Pair, ...] = (
    Pair(
        kind="emulated",
        fleet_name="laptop",
        devices=2,
        model="gpt",
        options=SMALL_GPT,
        data="text",
        sequence_length=64,
        slow=8,
        shares=(1, 1),
    ),
    Pair(
        kind="emulated",
        fleet_name="three-sites",
        devices=4,
        model="hf-llama",
        options=LLAMA,
        data="text",
        sequence_length=64,
        slow=4,
        micro_batch_size=2,
        shares=(1, 1, 2, 3),
    ),
    Pair(
        kind="emulated",
        fleet_name="dtfm-case5",
        devices=6,
        model="gpt",
        options=SMALL_GPT,
        data="text",
        sequence_length=64,
        slow=125_000,
        shares=(1, 1, 1, 1, 1, 1),
    ),
    Pair(
        kind="emulated",
        fleet_name="dtfm-case4",
        devices=4,
        model="unet",
        options=UNET,
        data="digits",
        slow=125_000,
        shares=(1, 1, 1, 1),
    ),
    Pair(
        kind="emulated",
        fleet_name="fluidstack",
        devices=4,
        model="hf-bert-classifier",
        options=BERT,
        data="sentence pairs",
        sequence_length=64,
        slow=149_700,
        shares=(1, 1, 1, 1),
    ),
    Pair(
        kind="network",
        fleet_name="three-sites",
        devices=3,
        model="gpt",
        options=GPT,
        data="text",
        sequence_length=128,
        shares=(2, 1, 1),
        warmups=((1, 1, 1), (3, 1, 1)),
    ),
    Pair(
        kind="network",
        fleet_name="three-sites",
        devices=4,
        model="unet",
        options=UNET,
        data="digits",
        micro_batch_size=8,
        shares=(1, 1, 1, 1),
        warmups=((2, 1, 2, 1), (1, 2, 1, 2)),
    ),
    Pair(
        kind="network",
        fleet_name="laptop",
        devices=2,
        model="hf-gpt2",
        options=GPT2,
        data="text",
        sequence_length=128,
        shares=(2, 3),
        warmups=((1, 1), (1, 2)),
    ),
    Pair(
        kind="network",
        fleet_name="dtfm-case5",
        devices=3,
        model="gpt",
        options=GPT,
        data="text",
        sequence_length=128,
        shares=(1, 1, 1),
        warmups=((2, 2, 1), (1, 2, 2)),
    ),
    Pair(
        kind="network",
        fleet_name="three-sites",
        devices=3,
        model="hf-llama",
        options=LLAMA,
        data="text",
        sequence_length=128,
        shares=(1, 1, 1),
        warmups=((2, 2, 1), (1, 2, 2)),
    ),
    Pair(
        kind="emulated",
        fleet_name="three-sites",
        devices=3,
        model="gpt",
        options=SMALL_GPT,
        data="text",
        sequence_length=64,
        slow=8,
        shares=(1, 2, 2),
        u_shaped=True,
    ),
    Pair(
        kind="emulated",
        fleet_name="fluidstack",
        devices=4,
        model="hf-bert-classifier",
        options=BERT,
        data="sentence pairs",
        sequence_length=64,
        slow=8 * 149_700,
        shares=(1, 1, 1, 1),
        u_shaped=True,
    ),
    Pair(
        kind="emulated",
        fleet_name="dtfm-case4",
        devices=5,
        model="gpt",
        options=SMALL_GPT,
        data="text",
        sequence_length=64,
        slow=125_000,
        shares=(1, 1, 1, 1, 1),
        u_shaped=True,
    ),
)

QUICK = (0, 3, 5, 6)
"""Two of each kind."""
