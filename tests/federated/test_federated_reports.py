"""What people see of a federated run."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
from rich.console import Console

from isthmus.api.rounds import round_step
from isthmus.federated.admission import Guarantee
from isthmus.federated.evaluation import ClientFigures, Evaluation, RoundLine
from isthmus.programs.open_phase import RoundRecord
from isthmus.protocol.federated_messages import ClientTime, LinearFit, RefusedUpdate
from isthmus.report.progress import Progress
from isthmus.report.rounds_table import last_figures, rounds_table, summarized
from tests.lazy import Lazy

pictures = Lazy("isthmus.report.timeline")

EACH = {str(client): 0.5 for client in range(5)}
CLIENTS = {"accuracy": ClientFigures(clients=5, mean=0.5, worst_decile=0.1, deviation=0.2, each=EACH)}


def line(round_: int, *, accuracy: float | None = 0.5) -> RoundLine:
    record = RoundRecord(
        round=round_,
        attempt=0,
        trained={"e0": (ClientTime(1, 10, 1.0), ClientTime(2, 20, 2.0)), "e1": (ClientTime(3, 30, 1.5),)},
        refused=(RefusedUpdate(4, "got nan"),),
        lines={"e0": LinearFit(0.1, 0.0), "e1": LinearFit(0.1, 0.0)},
        predicted_s=3.0,
        stolen=1,
    )
    evaluation = (
        Evaluation(loss=1.25, metrics={"accuracy": accuracy}, clients=CLIENTS) if accuracy is not None else None
    )
    return RoundLine(record=record, seconds=4.0, sent_bytes=1000, received_bytes=2000, evaluation=evaluation)


def test_figures_of_a_round() -> None:
    one = line(0)
    assert one.busy_s() == {"e0": 3.0, "e1": 1.5}
    assert one.makespan_s == 3.0
    error = one.time_error()
    assert error is not None
    assert abs(error - 1 / 3) < 1e-9  # predicted 1, 2 and 3 s, taken 1, 2 and 1.5 s


def test_a_round_is_said_in_one_line() -> None:
    console = Console(file=io.StringIO(), width=180)
    late = msgspec.structs.replace(line(1).record, stale=((7, 1),), closed_by="deadline")
    with Progress(console, "fedavg", clock=iter(range(1000)).__next__) as progress:
        progress.step(round_step(line(0), 3))
        progress.step(round_step(msgspec.structs.replace(line(1), record=late, rules="deadline 4 s"), 3))
    assert isinstance(console.file, io.StringIO)
    refused, ended = "client 4: got nan", "ended by the deadline (deadline 4 s)"
    figures = "4 s, 15 samples/s, 2.93 KiB over links"
    assert console.file.getvalue().splitlines() == [
        f"round 1/3, 3 clients, 1 refused, {figures}, {refused}",
        f"round 2/3, 3 clients, 1 refused, 1 late, {figures}, {ended}, {refused}, 1 s left",
    ]


def test_the_end_says_whose_figures_they_are_and_what_was_spent() -> None:
    spent = Guarantee(epsilon=3.0, delta=1e-5, rounds=8, sampling_probability=None)
    mean = "mean accuracy 50.0%, worst tenth 10.0%"
    assert last_figures([line(0), line(1, accuracy=None)], spent, of_sites=False) == [
        "held-out loss 1.2500, accuracy 50.0% after 2 rounds",
        f"clients' own data: {mean}, deviation 20.0%",
        f"privacy: {spent}; 2 rounds are done",
    ]
    assert last_figures([line(7)], spent, of_sites=True)[1:] == [
        f"sites' own data, before round 8: {mean}, deviation 20.0%",
        "  " + ", ".join(f"{name} {value:.1%}" for name, value in CLIENTS["accuracy"].each.items()),
        f"privacy: {spent}",
    ]


def test_a_sweep_has_the_worst_tenth_of_clients() -> None:
    evaluation = line(0).evaluation
    assert evaluation is not None and summarized(None) == {}
    loss = ClientFigures(clients=5, mean=2.0, worst_decile=3.0, deviation=0.5, each={})
    both = msgspec.structs.replace(evaluation, clients={"loss": loss, **CLIENTS})
    held = {"held-out loss": 1.25, "accuracy": 0.5}
    assert summarized(both) == {**held, "clients/accuracy": 0.5, "worst tenth/accuracy": 0.1}
    alone = msgspec.structs.replace(evaluation, clients={"loss": loss})
    assert summarized(alone) == {**held, "clients/loss": 2.0, "worst tenth/loss": 3.0}


def test_the_summary_leaves_the_first_round_out() -> None:
    console = Console(file=io.StringIO(), width=140, no_color=True)
    console.print(rounds_table([line(0), line(1)]))
    assert isinstance(console.file, io.StringIO)
    assert "2 rounds, the first left out" in console.file.getvalue()


def test_pictures_are_drawn_where_there_is_something_to_draw(tmp_path: Path) -> None:
    def drawn(name: str, *lines: RoundLine, axis: str = "round") -> bool:
        found = [(one.record.round, one.evaluation) for one in lines if one.evaluation is not None]
        return pictures.draw_evaluations(found, tmp_path / name, axis=axis)

    assert drawn("a.png", line(0), line(1))
    assert pictures.draw_throughput([line(0)], tmp_path / "p.png")
    pictures.draw_round_timeline(line(0), tmp_path / "r.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "p.png", "r.png"))
    alone = Evaluation(loss=None, clients=CLIENTS)
    lines = [msgspec.structs.replace(line(number), evaluation=alone) for number in range(2)]
    assert drawn("c.png", *lines) and (tmp_path / "c.png").is_file()
    many = {str(n): n / 12 for n in range(12)}
    ten = {str(n): n / 12 for n in range(10)}
    sizes: list[int] = []
    for name, each in (("many.png", many), ("ten.png", ten)):
        figures = {"accuracy": msgspec.structs.replace(CLIENTS["accuracy"], each=each)}
        assert drawn(
            name, *(msgspec.structs.replace(one, evaluation=Evaluation(loss=None, clients=figures)) for one in lines)
        )
        sizes.append((tmp_path / name).stat().st_size)
    assert sizes[0] < sizes[1], "ten have a line each"
    assert not drawn("none.png", line(0, accuracy=None))
    assert not (tmp_path / "none.png").exists()
