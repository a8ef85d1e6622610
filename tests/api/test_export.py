"""Exports to places that cannot take them."""

from __future__ import annotations

import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from isthmus.api.export import ExportOptions, export_model
from isthmus.api.folder import RunFolder
from isthmus.errors import UserError
from isthmus.models import LoraOptions, ModelSpec, build_model, merged, save_hugging_face
from isthmus.training.checkpoint import CheckpointWriter, Manifest, digest_of, not_persistent, rest, variables_of
from tests.generation.runs import GPT2, LLAMA, finished_run, fleet_of
from tests.runtime.jobs import TEXT, job_of


@contextmanager
def small_files(most_bytes: int) -> Generator[None]:
    """No file may be larger, as on a disk that is full: the system refuses both with an error of the same kind."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_export_to_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run, module = finished_run(tmp_path / "run")
    out = tmp_path / "out"
    with small_files(4096), pytest.raises(UserError, match=rf"^export: {out}: cannot be written: [^\n]+$"):
        export_model(run, out)
    assert not out.exists()
    export_model(run, out)  # the same command, once there is room
    assert (out / "model.safetensors").stat().st_size > 4 * sum(p.numel() for p in module.parameters()) // 2
    (tmp_path / "file").write_text("text")
    with pytest.raises(UserError, match=r"file/out: cannot be written: Not a directory"):
        export_model(run, tmp_path / "file" / "out")


SMALL = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
FAMILIES: dict[str, dict[str, object]] = {
    "hf-llama": {**LLAMA, "tie_word_embeddings": True},
    "hf-gpt2": GPT2,
    "hf:Qwen3ForCausalLM": {**SMALL, "num_key_value_heads": 1, "head_dim": 16, "dtype": "bfloat16"},
    "hf-resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "hf:MixtralForCausalLM": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4},  # computes its files' weights
}


def saved_run(folder: Path, name: str, options: dict[str, object]) -> nn.Module:
    """A run's folder with a checkpoint of two stages; returns the module that it is of."""
    run, job = RunFolder(folder), job_of(name, options, TEXT)
    run.begin(job, fleet_of(), None, 0)
    torch.manual_seed(1)
    module = build_model(job.model)
    writer, kept = CheckpointWriter(run.checkpoints), module.state_dict().keys()
    own: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    names = [name for name in own if name in kept]
    writer.write(2, "stage-0", {n: own[n] for n in names[::2]} | {"optimizer.x.step": torch.zeros(())})
    writer.write(2, "rest", {n: own[n] for n in names[1::2]})
    writer.commit(Manifest(step=2, seed=job.training.seed, batch=job.training.batch_size))
    return module


@pytest.mark.parametrize("size", [None, "20KB"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_is_what_save_pretrained_writes(tmp_path: Path, name: str, size: str | None) -> None:
    """Byte for byte, though the model is never built with its values."""
    module = saved_run(tmp_path / "run", name, FAMILIES[name])
    export_model(tmp_path / "run", tmp_path / "ours", ExportOptions(max_shard_size=size))
    save_hugging_face(module, tmp_path / "theirs", max_shard_size=size)
    ours, theirs = ({p.name: p for p in (tmp_path / who).iterdir()} for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert (len([n for n in ours if n.endswith(".safetensors")]) > 1) == (size is not None)
    for file, path in ours.items():
        assert path.read_bytes() == theirs[file].read_bytes(), file
        assert path.stat().st_mode == theirs[file].stat().st_mode


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"--max-shard-size: got '5', expected a size such as 5GB"):
        ExportOptions(max_shard_size="5")


def test_only_whole_models_of_transformers_are_split(tmp_path: Path) -> None:
    run, _ = finished_run(tmp_path / "run")
    with pytest.raises(UserError, match="--max-shard-size: the run's model is none of transformers"):
        export_model(run, tmp_path / "out", ExportOptions(max_shard_size="1MB"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_what_is_exported_for_it(tmp_path: Path) -> None:
    """Tied names too, and the optimizer's state."""
    module = saved_run(tmp_path / "run", "hf-llama", FAMILIES["hf-llama"])
    export_model(tmp_path / "run", tmp_path / "out", ExportOptions(format="dcp", optimizer=True))
    fresh = build_model(job_of("hf-llama", FAMILIES["hf-llama"], TEXT).model)
    assert not torch.equal(fresh.state_dict()["lm_head.weight"], module.state_dict()["lm_head.weight"])
    step = torch.tensor(1.0)
    dcp.load({"model": fresh.state_dict(), "optim": {"state": {"x": {"step": step}}}}, checkpoint_id=tmp_path / "out")
    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in module.state_dict().items())
    assert step == 0


@pytest.fixture
def alone() -> Generator[None]:
    """torch.distributed with one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_fsdp_goes_on_from_an_export_with_its_optimizer(tmp_path: Path) -> None:
    """As docs/jobs.md says it: the next step has the bits that it has in a plain loop."""
    options = FAMILIES["hf-llama"]
    job = job_of("hf-llama", options, TEXT)
    torch.manual_seed(1)
    plain, model = build_model(job.model), build_model(job.model)
    ids = torch.randint(64, (2, 8))

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trained_by = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(2):
        step(plain, trained_by)
    run = RunFolder(tmp_path / "run")
    run.begin(job, fleet_of(), None, 0)
    writer, parameters = CheckpointWriter(run.checkpoints), dict(plain.named_parameters())
    state = {f"optimizer.{n}.{k}": v for n, p in parameters.items() for k, v in trained_by.state[p].items()}
    writer.write(2, "stage-0", {**parameters, **state})
    writer.commit(Manifest(step=2, seed=job.training.seed, batch=8))
    export_model(run.path, tmp_path / "out", ExportOptions(format="dcp", optimizer=True))

    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": {"state": states["state"]}}, checkpoint_id=tmp_path / "out")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    step(plain, trained_by)
    step(model, optimizer)
    found = cast("dict[str, DTensor]", dict(model.named_parameters()))
    assert all(torch.equal(found[name].full_tensor(), value) for name, value in parameters.items())


def test_a_distributed_folder_is_a_start_once_it_is_exported(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", "hf-gpt2", GPT2)
    export_model(tmp_path / "run", tmp_path / "out", ExportOptions(format="dcp"))
    options: dict[str, object] = {"path": str(tmp_path / "out"), "task": "causal-lm"}
    with pytest.raises(UserError, match=r"'path': .*/out is a folder of torch\.distributed\.checkpoint, expected safe"):
        build_model(ModelSpec(name="hf", options=options))
    export_model(tmp_path / "out", tmp_path / "start")
    export_model(tmp_path / "run", tmp_path / "plain")
    found, expected = (
        build_model(ModelSpec(name="hf", options={**options, "path": str(tmp_path / name)})).state_dict()
        for name in ("start", "plain")
    )
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimizer": True}, "--optimizer: is for --format dcp"),
        ({"format": "dcp", "max_shard_size": "5GB"}, "takes no --max-shard-size"),
        ({"format": "dcp", "merge": True, "optimizer": True}, "expected it without --merge"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ExportOptions(**given)


def tuned_run(
    folder: Path, lora: LoraOptions, name: str = "hf-llama", options: dict[str, object] = LLAMA
) -> tuple[nn.Module, nn.Module]:
    """A run with LoRA on a model in `folder / "base"`, with a checkpoint of what is trained; returns that model, and
    the one that the run is of."""
    torch.manual_seed(1)
    plain = build_model(ModelSpec(name=name, options=options))
    save_hugging_face(plain, folder / "base")
    spec = ModelSpec(name="hf", options={"path": str(folder / "base"), "task": "causal-lm"}, lora=lora)
    run = RunFolder(folder / "run")
    run.begin(msgspec.structs.replace(job_of(name, options, TEXT), model=spec), fleet_of(), None, 0)
    module = build_model(spec)
    adapter = {n: nn.init.normal_(p).detach() for n, p in module.named_parameters() if p.requires_grad}
    own, writer = variables_of(module), CheckpointWriter(run.checkpoints)
    state = {f"optimizer.{n}.exp_avg": torch.rand_like(p) for n, p in adapter.items()}
    writer.write(2, "stage-0", adapter | state | {f"optimizer.{n}.step": torch.tensor(2.0) for n in adapter})
    kept = digest_of(rest(own, set(adapter), own.keys() - not_persistent(module)))
    writer.commit(Manifest(step=2, seed=0, batch=8, base=kept))
    return plain, module


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}


TUNED: dict[str, tuple[LoraOptions, str, dict[str, object]]] = {
    "llama": (LoraOptions(r=2), "hf-llama", LLAMA),
    "tied": (LoraOptions(r=2, lora_alpha=3, use_rslora=True), "hf-llama", {**LLAMA, "tie_word_embeddings": True}),
    "half": (LoraOptions(r=2, target_modules="all-linear"), "hf:Qwen3ForCausalLM", FAMILIES["hf:Qwen3ForCausalLM"]),
    "transposed": (LoraOptions(r=2), "hf-gpt2", GPT2),
    "biases": (LoraOptions(r=2, bias="all"), "hf-gpt2", GPT2),
}


@pytest.mark.parametrize("size", [None, "20KB"])
@pytest.mark.parametrize("name", TUNED)
def test_a_merged_adapter_is_written_a_tensor_at_a_time(
    name: str, size: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what peft merges and transformers saves, of weights that stay in their files."""
    _, module = tuned_run(tmp_path, *TUNED[name])
    monkeypatch.setattr("isthmus.api.export.merged", lambda module: pytest.fail("it would hold the whole model"))
    export_model(tmp_path / "run", tmp_path / "ours", ExportOptions(merge=True, max_shard_size=size))
    save_hugging_face(merged(module), tmp_path / "theirs", max_shard_size=size)
    ours, theirs = ({p.name: p for p in (tmp_path / who).iterdir()} for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    files = [file for file in ours if file.endswith(".safetensors")]
    if size is None:
        assert [ours[file].read_bytes() for file in files] == [theirs[file].read_bytes() for file in files]
    assert (len(files) > 1) == (size is not None)
    one, other = ({n: t for file in files for n, t in load_file(who[file]).items()} for who in (ours, theirs))
    assert one.keys() == other.keys()  # peft changes the order of layers, and so which file has which
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "lora",
    [
        LoraOptions(r=2, use_dora=True),
        LoraOptions(r=2, modules_to_save=("lm_head",)),
        LoraOptions(r=2, target_modules=("q_proj", "lm_head")),
    ],
)
def test_an_adapter_that_cannot_be_merged_in_pieces_is_merged_whole(lora: LoraOptions, tmp_path: Path) -> None:
    _, module = tuned_run(tmp_path, lora)
    export_model(tmp_path / "run", tmp_path / "ours", ExportOptions(merge=True))
    save_hugging_face(merged(module), tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_an_adapter_with_its_optimizer_and_a_merged_model(tmp_path: Path) -> None:
    plain, module = tuned_run(tmp_path, LoraOptions(r=2))
    export_model(tmp_path / "run", tmp_path / "adapter", ExportOptions(format="dcp", optimizer=True))
    export_model(tmp_path / "run", tmp_path / "whole", ExportOptions(format="dcp", merge=True))
    found = {name: torch.zeros_like(p) for name, p in trained(module).items()}
    state = {name: {"exp_avg": torch.zeros_like(p), "step": torch.zeros(())} for name, p in found.items()}
    dcp.load({"model": found, "optim": {"state": state}}, checkpoint_id=tmp_path / "adapter")
    assert all(torch.equal(found[name], value) for name, value in trained(module).items())
    assert all(one["step"] == 2 and one["exp_avg"].any() for one in state.values())
    dcp.load({"model": plain.state_dict()}, checkpoint_id=tmp_path / "whole")
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in merged(module).state_dict().items())


def test_an_adapter_is_exported_without_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which stays in its files: their digest is computed from there."""
    plain, module = tuned_run(tmp_path, LoraOptions(r=2))
    adapter = trained(module)
    monkeypatch.setattr("isthmus.api.export.program_of", lambda job: pytest.fail("it would build the whole model"))
    export_model(tmp_path / "run", tmp_path / "out")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {n.replace(".default", "") for n in adapter} == written.keys()
    assert all(torch.equal(written[n.replace(".default", "")], value) for n, value in adapter.items())
    with torch.no_grad():
        plain.get_parameter("model.norm.weight")[0] += 1e-6
    save_hugging_face(plain, tmp_path / "base")
    with pytest.raises(UserError, match="the pretrained weights are not those it was made with"):
        export_model(tmp_path / "run", tmp_path / "again")
