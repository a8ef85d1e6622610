"""A run's model served by processes, over emulated links; and what is refused."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch
from torch import Tensor, nn

from isthmus.api import generation
from isthmus.api.generation import ModelService, Piece, ServingChoices, generate, prompts_of, sampling_of, served_run
from isthmus.api.serving_fleet import Serving
from isthmus.data.tokenizer import ByteTokenizer
from isthmus.errors import Diverged, PeerError, UserError
from isthmus.graph import Affine, Op, OpGraph, Ref, TensorSpec
from isthmus.graph.captured import Captured
from isthmus.graph.serving import ATTENTION, POSITIONS, check_attention
from isthmus.graph.serving_capture import capture_serving
from isthmus.job.first_weights import Served, check_decoding
from isthmus.planners.generation import Chain
from isthmus.protocol.generation import Sampling
from isthmus.runtime.coordinator.generation_host import ServingStatistics
from isthmus.training.generation import TokenChooser
from isthmus.training.weights import initial_weights
from tests.faults.real import pid_of
from tests.fleet_service.holders import Joined
from tests.fleet_service.parties import serving
from tests.runtime.commands import isthmus
from tests.runtime.commands import refused as command_refused

from .runs import GPT2, by_transformers, finished_run

PROMPTS = [(5, 77, 200, 31, 8), (99,), (1, 2, 3, 4, 5, 6, 7, 8, 9)]
SAMPLINGS = [
    Sampling(max_tokens=30),
    Sampling(max_tokens=30, temperature=0.9, seed=3),
    Sampling(max_tokens=30, temperature=1.4, top_k=40, top_p=0.9, seed=6),
]


def test_processes_generate_as_transformers_and_replace_a_device_that_is_lost(tmp_path: Path) -> None:
    folder, module = finished_run(tmp_path / "run", "hf-gpt2", GPT2)
    expected = [[by_transformers(module, prompt, how) for prompt in PROMPTS] for how in SAMPLINGS]
    assert all(len(set(one)) > 5 for row in expected for one in row)
    notes: list[str] = []
    with served_run(folder, ServingChoices(at_once=2), notes.append) as service:
        assert service.statistics.chain.devices == ("d0", "d1", "d2")
        assert service.name == folder.name
        for how, row in zip(SAMPLINGS, expected, strict=True):
            assert [answer.tokens for answer in generate(service, PROMPTS, how).answers] == row
        halfway = threading.Barrier(2, action=lambda: os.kill(pid_of("d1"), signal.SIGKILL))
        found: dict[int, list[int]] = {0: [], 1: []}

        def ask(number: int) -> None:
            for piece in service.stream(PROMPTS[number], SAMPLINGS[2]):
                found[number].append(piece.token)
                if len(found[number]) == 7:
                    halfway.wait()

        threads = [threading.Thread(target=ask, args=(number,)) for number in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [tuple(found[number]) for number in found] == expected[2][:2]
        assert service.statistics.losses == 1 and "d1" not in service.statistics.chain.devices
        with pytest.raises(UserError, match="temperature: got 1e-40, which is too small"):
            next(service.stream(PROMPTS[0], Sampling(max_tokens=2, temperature=1e-40)))
        stream = service.stream(PROMPTS[0], SAMPLINGS[0])
        next(stream)
        stream.close()  # the place of a cancelled request is free again
        assert [answer.tokens for answer in generate(service, PROMPTS[:2], SAMPLINGS[0]).answers] == expected[0][:2]
    assert any(note.startswith("lost d1: its process was killed by SIGKILL") for note in notes), notes


@pytest.mark.long
def test_a_stage_on_an_accelerator_generates_the_same(tmp_path: Path) -> None:
    folder, module = finished_run(tmp_path / "run", "hf-gpt2", GPT2, device={"d1": "checked:0"})
    notes = list[str]()
    with served_run(folder, ServingChoices(at_once=2), notes.append) as service:
        found = [answer.tokens for answer in generate(service, PROMPTS, SAMPLINGS[0]).answers]
    assert found == [by_transformers(module, prompt, SAMPLINGS[0]) for prompt in PROMPTS], notes


@pytest.mark.long
def test_devices_that_joined_generate_leave_and_are_replaced(tmp_path: Path) -> None:
    """d3 is in the fleet file and never joins."""
    folder, module = finished_run(tmp_path / "run", "hf-gpt2", GPT2, stages=2)
    with serving(tmp_path / "fleet") as fleet:
        joined = Joined(fleet, tmp_path)
        for name in ("d0", "d1", "d2"):
            joined.add(name, None)
    notes: list[str] = []
    where = Serving(state=tmp_path / "fleet", port=fleet.address[1])
    try:
        with served_run(folder, ServingChoices(at_once=2, joined=where), notes.append) as service:
            stream = service.stream(PROMPTS[0], SAMPLINGS[2])
            found = [next(stream) for _ in range(7)]
            while isthmus("drain", "d0", "--state", tmp_path / "fleet").code:  # the fleet's status is a second old
                time.sleep(0.05)
            found += [next(stream) for _ in range(3)]
            while "d0" in service.statistics.chain.devices:
                time.sleep(0.05)
            joined.remove("d1")
            found += stream
            assert tuple(piece.token for piece in found) == by_transformers(module, PROMPTS[0], SAMPLINGS[2])
            assert asyncio.run(_tokens(service)) == by_transformers(module, PROMPTS[1], SAMPLINGS[0])
            assert service.statistics.losses == 1 and service.statistics.chain.devices == ("d2",)
    finally:
        joined.end()
    assert any(note.startswith("lost d1: ") for note in notes)
    assert "d0 has left: it was asked to" in notes


async def _tokens(service: ModelService) -> tuple[int, ...]:
    """As the endpoint reads them, after a request that is cancelled."""
    cancelled = service.pieces(PROMPTS[0], SAMPLINGS[0])
    await anext(cancelled)
    await cancelled.aclose()
    return tuple([piece.token async for piece in service.pieces(PROMPTS[1], SAMPLINGS[0])])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs") / "run")[0]


def refused(folder: Path, said: str) -> None:
    with pytest.raises(UserError, match=said), served_run(folder, ServingChoices(), lambda _: None):
        pass


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "not found, or not a run")


def test_a_run_without_a_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    refused(tmp_path / "run", "nothing saved there yet")


def test_another_kind_of_model_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    job = msgspec.json.decode((run / "job.json").read_bytes())
    job["model"] = {"name": "mlp"}
    (tmp_path / "run" / "job.json").write_bytes(msgspec.json.encode(job))
    refused(tmp_path / "run", "cannot be served: the forward of MLP takes no input_ids, position_ids")


def test_a_prompt_and_a_port_are_refused_before_devices_begin(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "LocalBackend", lambda **_: pytest.fail("devices begin"))
    command_refused(isthmus("generate", run, "--prompt", "x" * 64), 2, "prompt: got 64 tokens, expected 1 to 63")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command_refused(isthmus("serve-model", run, "--port", str(port)), 2, f"cannot listen on 127.0.0.1:{port}")


class OneFails:
    """Answers with one token, but for prompts that begin with 9."""

    statistics = ServingStatistics(
        chain=Chain(devices=(), boundaries=(), token_s=0.0, tokens_per_s=0.0, at_once=1), losses=0
    )

    def tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        assert not isinstance(prompt, str)
        return tuple(prompt)

    def stream(self, tokens: Sequence[int], sampling: Sampling) -> Generator[Piece]:
        yield Piece(tokens[0], "!", last=tokens[0] != 9)
        if tokens[0] == 9:
            raise PeerError("no device is left")


def test_an_answer_that_fails_leaves_the_others() -> None:
    found = generate(cast("ModelService", OneFails()), [(1,), (9,), (2,)], Sampling(max_tokens=1))
    assert [answer.tokens for answer in found.answers] == [(1,), (9,), (2,)]
    document = cast("list[dict[str, object]]", found.document()["answers"])
    assert [answer["failure"] for answer in document] == [None, "no device is left", None]
    with pytest.raises(PeerError, match=r"^prompt 2 of 3: no device is left$"):
        found.check()


def attention(**given: object) -> OpGraph:
    spec = TensorSpec("float32", (1, 2, Affine(1), 4), (8, 4, 8, 1))
    held = tuple(Op(name=n, kind="placeholder", target=n, outputs=(spec,)) for n in "qkvm")
    args = (Ref("q"), Ref("k"), Ref("v"))
    op = Op(name="a", kind="operator", target=ATTENTION, args=args, kwargs=given, outputs=(spec,), module="h.0.attn")  # type: ignore[arg-type]
    return OpGraph(name="g", mode="eval", ops=(*held, op), loss=Ref("a"))


def test_attention_must_be_causal() -> None:
    check_attention(attention(is_causal=True))
    for bad in ({}, {"attn_mask": Ref("m")}, {"attn_mask": Ref("m"), "is_causal": True}):
        with pytest.raises(UserError, match=r"attention in module 'h\.0\.attn' has a mask of its own"):
            check_attention(attention(**bad))
    without = msgspec.structs.replace(attention(), ops=attention().ops[:-1])
    with pytest.raises(UserError, match="has no scaled_dot_product_attention"):
        check_attention(without)


class Looking(nn.Module):
    """Attention is causal, but each token also takes the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        heads = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        hidden = hidden + mixed.transpose(1, 2).flatten(2) + hidden.mean(dim=1, keepdim=True)
        if position_ids is not None:
            hidden = hidden + 0 * position_ids.unsqueeze(-1)
        return {"logits": hidden @ self.table.weight.T}


def test_a_model_that_looks_at_tokens_in_another_way_is_refused() -> None:
    graph, constants, context = capture_serving(Looking, name="looking", dtype=torch.float32, trained=32)
    torch.manual_seed(0)
    module = Looking().eval()
    captured = Captured(train=graph, eval=graph, constants=constants | {POSITIONS: torch.empty(0)})
    served = Served(graph=graph, weights=initial_weights(lambda: module, captured, 0), context=context, step=0)
    with pytest.raises(UserError, match="computed token by token its logits differ by"):
        check_decoding(served, module, 1e-3)


def test_logits_that_a_temperature_makes_infinite_are_refused() -> None:
    chooser = TokenChooser(Sampling(temperature=1e-40), 0, 8)
    with pytest.raises(UserError, match="temperature: got 1e-40"):
        chooser.choose(torch.arange(8.0).unsqueeze(0))


def test_a_token_whose_logit_is_minus_infinity_is_never_chosen() -> None:
    """As the rows that pad a vocabulary. NaN, infinity, and no token at all are the end."""
    logits = torch.tensor([[0.5, -torch.inf, 0.7, -torch.inf]])
    assert TokenChooser(Sampling(max_tokens=1), 0, 4).choose(logits) == (2, True)
    chooser = TokenChooser(Sampling(temperature=1.0, max_tokens=60, seed=1), 0, 4)
    assert {chooser.choose(logits)[0] for _ in range(50)} == {0, 2}
    for bad in (torch.nan, torch.inf):
        with pytest.raises(Diverged, match="logits are not finite"):
            chooser.choose(torch.tensor([[0.5, bad]]))
    with pytest.raises(Diverged, match="logits are not finite"):
        chooser.choose(torch.full((1, 4), -torch.inf))


@pytest.fixture
def service() -> Generator[ModelService]:
    graph = attention()
    logits = TensorSpec("float32", (1, 256), (256, 1))
    graph = msgspec.structs.replace(
        graph, ops=(*graph.ops[:-1], msgspec.structs.replace(graph.ops[-1], outputs=(logits,)))
    )
    served = Served(graph=graph, weights={}, context=16, step=0)
    yield ModelService(None, served, ByteTokenizer(), "gpt")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "got 0 tokens, expected 1 to 15"),
        ("x" * 16, "got 16 tokens, expected 1 to 15"),
        ([1, 256], "got token 256, the model has 0 to 255"),
        ([9, -1], "got token -1"),
        ("a\udcff", r"got '\\udcff' at 1, expected a text in UTF-8"),
    ],
)
def test_prompts_that_the_model_cannot_take(service: ModelService, given: str | list[int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        service.tokens(given)


def test_a_text_without_a_tokenizer_is_refused(service: ModelService) -> None:
    without = ModelService(None, Served(graph=attention(), weights={}, context=9, step=0), None, "gpt")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the run's data have no tokenizer"):
        without.tokens("text")


def test_what_the_command_reads() -> None:
    assert prompts_of(["a"], ["1,2"]) == ["a", (1, 2)]
    for texts, ids, said in (([], [], "got no prompt"), ([], ["1,x"], "got '1,x'")):
        with pytest.raises(UserError, match=said):
            prompts_of(texts, ids)
    with pytest.raises(UserError, match=r"sampling: top_p: got 0\.0, expected `float` > 0\.0"):
        sampling_of(top_p=0.0)


def test_a_run_of_decoupled_replicas_which_has_no_plan_is_served_where_its_fleet_file_is_not(
    run: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "plan.json").unlink()
    job = msgspec.json.decode((folder / "job.json").read_bytes())
    (folder / "job.json").write_bytes(msgspec.json.encode(job | {"fleet": "elsewhere.toml"}))
    notes: list[str] = []
    with served_run(folder, ServingChoices(), notes.append) as service:
        (found,) = generate(service, [(1, 2, 3)], Sampling(max_tokens=5)).answers
    assert len(found.tokens) == 5 and any(note.startswith("stages on ") for note in notes)


def test_a_service_is_predicted_also_under_faults(run: Path) -> None:
    asked = ("generate", run, "--tokens", "1,2,3", "--max-tokens", "20")
    quiet, lost = isthmus(*asked, "--simulate"), isthmus(*asked, "--simulate", "--fault", "d1@1ms")
    assert "answer 1: 20 tokens, the first after" in quiet.out
    assert quiet.out.splitlines()[-1].startswith("predicted: ")
    assert "lost d1: its process was killed by SIGKILL; 1 request goes on" in lost.out
    assert "answer 1: 20 tokens" in lost.out
    command_refused(isthmus(*asked, "--fault", "d1@1ms"), 2, "--fault: got it without --simulate, expected both")
    command_refused(isthmus(*asked, "--simulate", "--fault", "d9@1s"), 2, "unknown device in --fault 'd9'")
    command_refused(isthmus(*asked, "--simulate", "--fault", "coordinator@1s+1s"), 2, "for generation, expected")
    left = isthmus(*asked, "--simulate", "--leave", "d1@1ms", "--slow", "d0@0s:1e8")
    # d3 is called at 1 s, its process takes 3 s, and its stage 0.2 s more.
    every = [option for at in ("d0@0s", "d1@1ms", "d2@2ms", "d3@4.1s") for option in ("--fault", at)]
    command_refused(isthmus(*asked, "--simulate", *every), 4, "no device is left")
    assert "d1 has left: it was asked to" in left.out and "answer 1: 20 tokens" in left.out
