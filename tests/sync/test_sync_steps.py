"""Steps, saved states and models that are used wrongly are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.sync import Options, Sync, attach, load_worker, save_worker

from .small import MEETING, Bytes, attached, loss_of, net, sgd

FREE = sorted(set(MEETING) - {"dream", "dreamddp"})
"""Modes that do not update inside backward."""


@pytest.mark.usefixtures("alone")
class TestSteps:
    @pytest.mark.parametrize("mode", MEETING)
    def test_the_optimizers_own_step(self, mode: str) -> None:
        model, optimizer, _ = attached(mode)
        loss_of(model).backward()
        with pytest.raises(UserError, match=r"optimizer\.step\(\) was called directly"):
            optimizer.step()

    @pytest.mark.parametrize("mode", ["dream", "every-step"])
    def test_unused_parameter(self, mode: str) -> None:
        model, _, _ = attached(mode)
        with pytest.raises(UserError, match=r"parameter '2\.weight' and 1 more got no gradient"):
            model[0](torch.ones(3, 4)).sum().backward()

    @pytest.mark.parametrize("mode", ["local", "outer", "partial", "streaming"])
    def test_a_layer_without_gradient_stays_as_it_is_elsewhere(self, mode: str) -> None:
        model, _, sync = attached(mode, period=1)
        before = [p.detach().clone() for p in model.parameters()]
        model[0](torch.ones(3, 4)).sum().backward()
        sync.step()
        changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert changed == [True, True, False, False]

    @pytest.mark.parametrize("mode", MEETING)
    def test_a_frozen_layer_is_no_layer(self, mode: str) -> None:
        model = net()
        model[0].requires_grad_(False)
        frozen, moving = model[0].weight.detach().clone(), model[2].weight.detach().clone()
        sync = attach(model, sgd(model), mode=mode, period=1)
        loss_of(model).backward()
        sync.step()
        sync.wait()
        assert torch.equal(model[0].weight, frozen) and not torch.equal(model[2].weight, moving)

    @pytest.mark.parametrize("mode", ["dream", "every-step"])
    def test_step_without_backward(self, mode: str) -> None:
        _, _, sync = attached(mode)
        with pytest.raises(UserError, match=r"expected loss\.backward\(\)"):
            sync.step()

    @pytest.mark.parametrize("mode", MEETING)
    def test_step_after_close(self, mode: str) -> None:
        """With several workers it would wait for ever: nobody sums any more."""
        model, optimizer, sync = attached(mode)
        sync.close()
        sync.close()
        loss_of(model).backward()
        with pytest.raises(UserError, match=r"sync\.step\(\): this Sync is closed"):
            sync.step()
        optimizer.step()

    @pytest.mark.parametrize("mode", ["local", "outer", "partial"])
    def test_what_averaged_state_has_no_place_for(self, mode: str) -> None:
        """Workers would go apart without a word, or send each other messages of different length."""

        def made(model: nn.Module) -> Sync:
            options = Options(average_state=True, smallest_layer_bytes=0)
            return attach(model, torch.optim.SGD(model.parameters(), lr=0.1), mode=mode, period=3, options=options)

        model = net()
        sync = made(model)
        loss_of(model).backward()
        with pytest.raises(UserError, match="'average_state': got a closure, whose gradients come after"):
            sync.step(lambda: loss_of(model))
        with pytest.raises(UserError, match="'average_state': got a GradScaler, whose scale comes off after"):
            sync.step(scaler=torch.amp.GradScaler("cpu"))
        sync.step()
        model[2].weight.grad = None
        with pytest.raises(UserError, match=r"'average_state': parameter '2\.weight' has no gradient"):
            sync.step()
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        sync = made(model)
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(UserError, match=r"'average_state': parameter '0\.weight' has a sparse gradient"):
            sync.step()

    @pytest.mark.parametrize("mode", MEETING)
    def test_what_becomes_trainable_later(self, mode: str) -> None:
        """Layers thawed one after the other: they would go apart without a word, and in `dream` not learn."""
        model = net()
        model[0].requires_grad_(False)
        optimizer = sgd(model)
        sync = attach(model, optimizer, mode=mode, period=2)
        model[0].requires_grad_(True)
        loss_of(model).backward()
        with pytest.raises(UserError, match=r"shape \(8, 4\) that is not averaged: .*or not trainable\. Attach"):
            sync.step()
        sync.close()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(UserError, match=r"shape \(2,\) that is not averaged"):
            attach(model, optimizer, mode=mode, period=2)

    @pytest.mark.parametrize("mode", FREE)
    def test_a_closure_may_give_a_float(self, mode: str) -> None:
        model, optimizer, sync = attached(mode)

        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss.item()

        assert sync.step(closure) == pytest.approx(loss_of(net()).item())  # pyright: ignore[reportArgumentType]

    def test_second_backward_in_dream(self) -> None:
        model, _, _ = attached("dream")
        loss_of(model).backward()
        with pytest.raises(UserError, match=r"second backward pass before sync\.step.*no_sync"):
            loss_of(model).backward()

    def test_clipping_in_dream(self) -> None:
        model, _, sync = attached("dream")
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(UserError, match=r"that of '0\.weight' after backward .* clip_grad_norm_"):
            sync.step()

    def test_gradients_put_in_place_of_others_in_dream(self) -> None:
        model, _, sync = attached("dream")
        loss_of(model).backward()
        model[2].bias.grad = model[2].bias.grad / 2
        with pytest.raises(UserError, match=r"that of '2\.bias' after backward"):
            sync.step()

    def test_grad_scaler_in_dream(self) -> None:
        model, _, sync = attached("dream")
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model)).backward()
        with pytest.raises(UserError, match="GradScaler: got one in a mode that updates inside backward"):
            sync.step(scaler=scaler)

    def test_closure_in_dream(self) -> None:
        model, _, sync = attached("dream")
        loss_of(model).backward()
        with pytest.raises(UserError, match=r"closure\): got one in a mode that updates inside"):
            sync.step(lambda: loss_of(model))

    @pytest.mark.parametrize("mode", ["dream", "local"])
    def test_model_moved_afterwards(self, mode: str) -> None:
        model, _, sync = attached(mode)
        model.double()
        with pytest.raises(UserError, match=r"'0\.weight' was given other memory"):
            sync.step()

    def test_sparse_gradients(self) -> None:
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        attach(model, sgd(model), mode="every-step", options=Options(smallest_layer_bytes=0))
        with pytest.raises(UserError, match="layer '0' has sparse gradients"):
            model(torch.tensor([1, 2])).sum().backward()

    @pytest.mark.parametrize("mode", FREE)
    def test_what_dream_refuses_works_elsewhere(self, mode: str) -> None:
        model, _, sync = attached(mode)
        scaler = torch.amp.GradScaler("cpu")
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(sync.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        sync.step(scaler=scaler)
        scaler.update()
        pairs = zip(model.parameters(), before, strict=True)
        moved = float(torch.cat([(now.detach() - then).flatten() for now, then in pairs]).norm())
        # One step of 0.1 along a gradient of norm 0.1; `streaming` and `outer` exchange later.
        assert moved == pytest.approx(0.01, rel=1e-3)

    def test_state_of_another_mode(self) -> None:
        _, _, local = attached("local")
        _, _, outer = attached("outer")
        with pytest.raises(UserError, match=r"saved sync state: mode: was made with local, expected outer"):
            outer.load_state_dict(local.state_dict())

    def test_state_of_another_period(self) -> None:
        _, _, local = attached("local", period=5)
        _, _, other = attached("local", period=3)
        with pytest.raises(UserError, match=r"saved sync state: period: was made with 5, expected 3"):
            other.load_state_dict(local.state_dict())

    def test_state_of_another_codec(self) -> None:
        model = net()
        packed = attach(model, sgd(model), mode="outer", period=2, codec=Bytes())
        _, _, outer = attached("outer")
        with pytest.raises(UserError, match=r"saved sync state: codec: was made with Bytes, expected None"):
            outer.load_state_dict(packed.state_dict())

    def test_state_of_another_model(self) -> None:
        _, _, outer = attached("outer")
        model = nn.Linear(3, 3)
        other = attach(model, sgd(model), mode="outer", period=2)
        with pytest.raises(UserError, match=r"'outer\.0': got shape .*same model"):
            outer.load_state_dict(other.state_dict())

    def test_file_of_a_model_of_other_shapes(self, tmp_path: Path) -> None:
        """One element would be copied to all, and torch's own words name neither file nor parameter."""
        small, large = nn.Linear(1, 1), nn.Linear(3, 3)
        for model in (small, large):
            optimizer = sgd(model)
            sync = attach(model, optimizer, mode="local")
            if model is small:
                save_worker(tmp_path / "one", model, optimizer, sync)
            else:
                with pytest.raises(UserError, match=r"one: 'weight': got shape \(1, 1\), expected \(3, 3\)"):
                    load_worker(tmp_path / "one", model, optimizer, sync)

    @pytest.mark.parametrize("mode", MEETING)
    def test_taken_back_to_the_start(self, mode: str, tmp_path: Path) -> None:
        """What came after the file was written is forgotten, momentum of the outer step too."""
        model, optimizer, sync = attached(mode)
        save_worker(tmp_path / "one", model, optimizer, sync)
        ends: list[list[Tensor]] = []
        for _ in range(2):
            load_worker(tmp_path / "one", model, optimizer, sync)
            for _ in range(5):
                optimizer.zero_grad()
                loss_of(model).backward()
                sync.step()
            ends.append([p.detach().clone() for p in model.parameters()])
        assert all(one.equal(other) for one, other in zip(*ends, strict=True))

    def test_numbers_of_an_optimizer_are_kept(self, tmp_path: Path) -> None:
        model, optimizer, sync = attached("local")
        optimizer.state[model[0].weight].update(count=3, rate=0.25, warm=True)
        save_worker(str(tmp_path / "one"), model, optimizer, sync)
        again, other, later = attached("local")
        load_worker(tmp_path / "one", again, other, later)
        kept = other.state[again[0].weight]
        assert {key: (kept[key], type(kept[key])) for key in ("count", "rate", "warm")} == {
            "count": (3, int),
            "rate": (0.25, float),
            "warm": (True, bool),
        }

    def test_what_an_optimizer_keeps_in_lists_is_refused(self, tmp_path: Path) -> None:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters())
        sync = attach(model, optimizer, mode="local")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        sync.step(closure)
        with pytest.raises(UserError, match=r"optimizer LBFGS: its state '\w+' is a list: expected tensors"):
            save_worker(tmp_path / "one", model, optimizer, sync)
        assert not list(tmp_path.iterdir())

    def test_no_sync_within_no_sync(self) -> None:
        model = net()
        sync = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), mode="dream", period=1)
        before = [p.detach().clone() for p in model.parameters()]
        with sync.no_sync():
            with sync.no_sync():
                loss_of(model).backward()
            loss_of(model).backward()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
