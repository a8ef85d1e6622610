"""Averages that reach into the next forward: who waits for what, and when."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from isthmus.models.gpt import GPT, GPTConfig
from isthmus.plans.plan import Certificate
from isthmus.plans.sync import SyncIteration, SyncPlan
from isthmus.sync import Options, Sync, attach
from isthmus.sync.averaging import MeasuredAverage
from isthmus.sync.hooks import ForwardBarriers
from isthmus.sync.layers import flatten


class Watched:
    """Gates of a model, and what they said."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = flatten(model, smallest_layer_bytes=0).layers
        self.description: list[str] = []
        self.barriers = ForwardBarriers(
            model,
            self.layers,
            lambda n: self.description.append(self.layers[n].name),
            lambda n: self.description.append(f"touched {self.layers[n].name}"),
        )
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *_, name=name: self.description.append(f"{name} done"))

    def after(self, run: Callable[[], object]) -> list[str]:
        self.description.clear()
        run()
        return list(self.description)


def test_a_layer_is_entered_just_before_its_own_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    watched = Watched(model)
    for _ in range(2):
        told = watched.after(lambda: model(torch.ones(1, 3)))
        assert told == ["0", "0 done", "1 done", "2", "2 done", " done"]
    assert watched.barriers.proven


def test_what_is_read_past_its_own_module_is_waited_for_at_the_start() -> None:
    """nn.MultiheadAttention reads its out_proj's parameters itself: that module is never entered."""
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    attention = model[1]
    model.forward = lambda x: attention(*[model[0](x)] * 3)[0]  # pyright: ignore[reportAttributeAccessIssue]
    watched = Watched(model)
    watched.after(lambda: model(torch.ones(2, 1, 4)))
    told = watched.after(lambda: model(torch.ones(2, 1, 4)))
    assert told == ["1.out_proj", "0", "0 done", "1", "1 done", " done"]


def test_positions_of_a_gpt_are_read_by_the_whole() -> None:
    model = GPT(GPTConfig(vocab_size=16, sequence_length=4, width=8, layers=1, heads=2))
    watched = Watched(model)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    watched.after(lambda: model(ids, ids))
    told = watched.after(lambda: model(ids, ids))
    assert told.index("position") < told.index("token") < told.index("token done")


def test_a_tied_parameter_is_waited_for_by_whoever_comes_first() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.forward = lambda x: model[0](model[1](x))  # pyright: ignore[reportAttributeAccessIssue]
    told = Watched(model).after(lambda: model(torch.ones(1, 3)))
    assert told == ["0", "1 done", "0", "0 done", " done"]


def test_a_state_dict_is_taken_and_set_between_averages() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    watched = Watched(model)
    assert watched.after(model.state_dict) == ["touched 0", "touched 1"]
    state = copy.deepcopy(model.state_dict())
    assert watched.after(lambda: model.load_state_dict(state)) == ["touched 0", "touched 1"]


def test_a_forward_that_fails_proves_nothing_wrong() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    watched = Watched(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 4))
    watched.barriers.detach()
    assert watched.after(lambda: model(torch.ones(1, 3))) == ["0 done", " done"]


def test_detached_gates_are_silent() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    watched = Watched(model)
    watched.barriers.detach()
    assert watched.after(lambda: (model(torch.ones(1, 3)), model.state_dict())) == ["0 done", " done"]


def _attached(options: Options) -> tuple[nn.Sequential, torch.optim.Optimizer, Sync]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, attach(model, optimizer, mode="dream", period=1, options=options)


def _plan() -> SyncPlan:
    one = SyncIteration(scheduled=("1", "0"), filled=(), iteration_s=1.0, exposed_s=0.0)
    return SyncPlan(
        planner="dream",
        layers=("0", "1"),
        forward_overlap=True,
        iterations=(one,),
        period_s=1.0,
        workers=(),
        slowest="",
        certificate=Certificate(lower_bound=1.0, gap=0.0, question=""),
    )


@pytest.mark.usefixtures("alone")
class TestDream:
    @pytest.fixture
    def waits(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Sizes of the averages that were waited for."""
        waited: list[int] = []
        wait = MeasuredAverage.wait

        def noted(average: MeasuredAverage) -> float:
            waited.append(sum(map(len, average._flats)))  # pyright: ignore[reportPrivateUsage]
            return wait(average)

        monkeypatch.setattr(MeasuredAverage, "wait", noted)
        return waited

    def test_no_hook_becomes_part_of_a_compiled_graph(self) -> None:
        """torch.compile would break its graph where a hook looks at the clock."""
        model, _, _ = _attached(Options())
        hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]  # pyright: ignore
        assert len(hooks) == 4 and all(getattr(hook, "_torchdynamo_disable", False) for hook in hooks)

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, sync: Sync) -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        sync.step()
        return loss

    def test_the_next_forward_waits_layer_by_layer(self, waits: list[int]) -> None:
        model, optimizer, sync = _attached(Options(smallest_layer_bytes=0, plan=_plan(), forward_overlap=True))
        self._step(model, optimizer, sync)
        assert waits == []
        model[1].register_forward_pre_hook(lambda *_: waits.append(-1))
        model[0].register_forward_hook(lambda *_: waits.append(-2))
        model(torch.ones(2, 4))
        assert waits == [20, -2, 20, -1]

    @pytest.mark.parametrize("how", ["wait", "state_dict", "close", "model"])
    def test_whoever_asks_waits_for_all(self, waits: list[int], how: str) -> None:
        model, optimizer, sync = _attached(Options(smallest_layer_bytes=0, plan=_plan(), forward_overlap=True))
        self._step(model, optimizer, sync)
        (model.state_dict if how == "model" else getattr(sync, how))()
        assert waits == [20, 20]

    @pytest.mark.parametrize("average_state", [False, True])
    def test_or_the_step_waits(self, waits: list[int], average_state: bool) -> None:
        options = Options(smallest_layer_bytes=0, plan=_plan(), average_state=average_state)
        model, optimizer, sync = _attached(options)
        self._step(model, optimizer, sync)
        assert len(waits) == 2
