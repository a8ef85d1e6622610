"""`isthmus plan`: compared, explained, drawn, and verified."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from isthmus.api.make_plan import plan_for
from isthmus.errors import FleetTooSmall
from isthmus.job import fleet_of, load_job, prepare
from isthmus.planners import registry
from isthmus.plans import Compression, CompressionConfig, load_plan, save_plan

from .commands import edited, isthmus, refused, write_job


def refusing(problem: object) -> None:
    """Never."""
    raise FleetTooSmall("device d0 is 7 B short")


def test_planners_are_compared_and_refusals_have_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.PlannerEntry(f"{__name__}:refusing")
    monkeypatch.setattr(registry, "_OURS", {**registry._OURS, "refusing": entry})  # pyright: ignore[reportPrivateUsage]
    job = write_job(tmp_path, fleet="three-sites")
    done = isthmus("plan", job, "--compare", "even, chain,refusing,even", "--json")
    assert done.code == 0, done.err
    rows = {row["planner"]: row for row in json.loads(done.out)["rows"]}
    assert list(rows)[-1] == "refusing" and len(rows) == 3
    assert rows["refusing"]["refused"] == "device d0 is 7 B short" and rows["refusing"]["step_s"] is None
    for name in ("even", "chain"):
        row = rows[name]
        assert row["refused"] is None
        assert row["plan_s"] > 0 and row["step_s"] > 0 and row["simulated_step_s"] > 0
        assert 0 < row["headroom"]["share"] < 1 and row["replicas"] == 1
    assert rows["chain"]["step_s"] <= rows["even"]["step_s"]
    assert rows["chain"]["lower_bound_s"] <= rows["chain"]["step_s"]
    assert len({(row["lower_bound_s"], row["question"]) for row in rows.values() if row["refused"] is None}) == 1
    alone = isthmus("plan", job, "--compare", "refusing")
    assert alone.code == 3 and "refusing made no plan: device d0 is 7 B short" in alone.out


def test_all_planners_are_compared_in_one_table(tmp_path: Path) -> None:
    done = isthmus("plan", write_job(tmp_path), "--compare", "all")
    assert done.code == 0, done.err
    for name in ("auto", "chain", "even", "simulated", "lower bound"):
        assert name in done.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--compare", "evne"), ["unknown planner 'evne'", "'even'"]),
        (("--compare", ","), ["--compare: got ','", "all"]),
        (("--compare", "all", "--verify", "p.json"), ["--compare and --verify"]),
        (("--verify", "p.json", "--explain"), ["--verify and --explain"]),
        (("--verify", "nowhere.json"), ["nowhere.json", "not found"]),
        (("--picture", "no/such/folder/plan.png"), ["--picture", "no/such/folder is not a folder"]),
    ],
)
def test_what_cannot_be_done(tmp_path: Path, options: tuple[str, ...], words: list[str]) -> None:
    refused(isthmus("plan", write_job(tmp_path), *options), 2, *words)


def test_a_plan_is_explained_drawn_and_verified(tmp_path: Path) -> None:
    job = write_job(tmp_path, fleet="three-sites")
    picture, document = tmp_path / "plan.png", tmp_path / "plan.json"
    explained = isthmus("plan", job, "--explain", "--picture", str(picture))
    assert explained.code == 0, explained.err
    assert "What sets the pace" in explained.out and "What would help most" in explained.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = isthmus("plan", job, "--explain", "--json")
    told = json.loads(done.out)
    assert told["explanation"]["helps"][0]["saved"] > 0
    document.write_text(json.dumps(told["plan"]))
    verified = isthmus("plan", job, "--verify", str(document))
    assert verified.code == 0 and "figures hold" in verified.out, verified
    told["plan"]["predicted"]["step_s"] *= 1.01
    told["plan"]["replicas"][0]["stages"][1]["memory"]["weights"] += 1
    document.write_text(json.dumps(told["plan"]))
    tampered = isthmus("plan", job, "--verify", str(document), "--json")
    found = json.loads(tampered.out)
    assert tampered.code == 1 and not found["holds"]
    assert [d["field"] for d in found["differences"]] == ["replicas[0].stages[1].memory.weights", "predicted.step_s"]
    document.write_text("{}")
    refused(isthmus("plan", job, "--verify", str(document)), 2, "cannot be read: Object missing required field `model`")


def test_state_of_the_jobs_optimizers_is_verified(tmp_path: Path) -> None:
    job = edited(
        write_job(tmp_path),
        ("[learning_rate]", '[[optimizer]]\nname = "sgd"\nmomentum = 0.9\n[learning_rate]'),
        ("batch_size = 8", 'batch_size = 8\nprecision = "bf16"'),
    )
    document = tmp_path / "plan.json"
    document.write_text(isthmus("plan", job, "--json").out)
    done = isthmus("plan", job, "--verify", str(document))
    assert done.code == 0, done.out


PRICED = """
name = "clinics"
[[device]]
name = "hospital"
region = "clinic"
compute = "{speed}"
memory = "{memory}"
price_per_hour = 1.0
[[device]]
name = "cloud"
region = "far"
compute = "40 GFLOPS"
memory = "2 GiB"
price_per_hour = 3.0
count = 2
[links]
intra = {{ latency = "0.1 ms", bandwidth = "10 Gbit/s" }}
default = {{ latency = "1 ms", bandwidth = "1 Gbit/s" }}
[[region]]
region = "clinic"
egress_price_per_gb = 0.1
"""


def clinics(folder: Path, *plan: str, speed: str = "2 GFLOPS", memory: str = "2 GiB", planner: str = "chain") -> Path:
    fleet = folder / "clinics.toml"
    fleet.write_text(PRICED.format(speed=speed, memory=memory))
    table = "[plan]\n" + "\n".join(plan) + "\n[learning_rate]"
    return edited(write_job(folder, fleet=str(fleet), planner=planner), ("[learning_rate]", table))


def test_a_plan_that_keeps_data_and_labels_is_explained_verified_and_simulated(tmp_path: Path) -> None:
    job = clinics(tmp_path, 'data_holder = "clinic"', "labels_stay = true", speed="20 MFLOPS", planner="auto")
    done = isthmus("plan", job, "--explain", "--json", "--picture", str(tmp_path / "plan.png"))
    assert done.code == 0, done.err
    told = json.loads(done.out)
    devices = [stage["device"] for stage in told["plan"]["replicas"][0]["stages"]]
    assert len(devices) > 2 and devices[0] == devices[-1] == "hospital"
    assert told["plan"]["constraints"] == {"data_holders": ["hospital"], "labels_stay": True, "memory_headroom": 0.1}
    assert any("Labels stay there too" in line for line in told["explanation"]["step"])
    document = tmp_path / "plan.json"
    document.write_text(json.dumps(told["plan"]))
    verified = isthmus("plan", job, "--verify", str(document))
    assert verified.code == 0, verified.out
    elsewhere = edited(job, ('"clinic"', '"cloud-1"'))
    assert isthmus("plan", elsewhere, "--verify", str(document)).code == 1
    simulated = isthmus("simulate", edited(elsewhere, ('"cloud-1"', '"clinic"')), "--plan", str(document), "--json")
    assert simulated.code == 0, simulated.err
    assert {pair.split(" -> ")[0] for pair in json.loads(simulated.out)["link_bytes"]} == set(devices)


def test_the_cheapest_plan_and_its_row(tmp_path: Path) -> None:
    job = clinics(tmp_path, speed="30 GFLOPS")
    fast, cheap = (json.loads(isthmus("plan", job, "--json", *o).out) for o in ((), ("--objective", "cost")))
    assert fast["certificate"]["objective"] == "step" and cheap["certificate"]["objective"] == "cost"
    assert cheap["constraints"] == {"objective": "cost", "memory_headroom": 0.1}
    assert cheap["predicted"]["step_s"] >= fast["predicted"]["step_s"]
    compared = json.loads(isthmus("plan", job, "--objective", "cost", "--compare", "even,auto,chain", "--json").out)
    rows = {row["planner"]: row for row in compared["rows"]}
    prices = [row["price_per_1000_steps"] for row in compared["rows"]]
    assert prices == sorted(prices) and compared["objective"] == "cost"
    assert rows["auto"]["lower_bound_per_1000_steps"] > 0 and rows["auto"]["lower_bound_s"] is None
    assert rows["even"]["lower_bound_per_1000_steps"] == pytest.approx(rows["auto"]["lower_bound_per_1000_steps"])
    table = isthmus("plan", job, "--objective", "cost", "--explain").out
    assert "Price of 1,000 steps" in table and "which was minimised" in table
    document = tmp_path / "plan.json"
    document.write_text(json.dumps(cheap))
    assert isthmus("plan", job, "--objective", "cost", "--verify", str(document)).code == 0
    wrong = isthmus("plan", job, "--verify", str(document), "--json")
    assert json.loads(wrong.out)["differences"][0]["field"] == "constraints.objective"


def test_terms_that_cannot_be_kept_name_what_binds(tmp_path: Path) -> None:
    small = clinics(tmp_path, 'data_holder = "hospital"', "labels_stay = true", memory="20 KiB")
    words = ("hospital (the data_holder, where labels_stay)", "short", "plan.labels_stay")
    refused(isthmus("plan", small), 3, *words)
    refused(isthmus("plan", small, "--planner", "op-fence"), 2, "plan.labels_stay", "'op-fence'", "'auto', 'chain'")


def with_compression(path: Path, method: str, ratio: float = 50) -> Path:
    return edited(path, ("[model]", f'[compression]\nmethod = "{method}"\nratio = {ratio}\n\n[model]'))


def test_a_job_chooses_its_compression(tmp_path: Path) -> None:
    job = with_compression(write_job(tmp_path, fleet="three-sites"), "uniform")
    planned = isthmus("plan", job, "--json")
    assert planned.code == 0, planned.err
    document = tmp_path / "plan.json"
    document.write_text(planned.out)
    plan = load_plan(document)
    for edge in plan.replica.edges:
        for packed in (edge.forward_compression, edge.backward_compression):
            assert packed is not None and (packed.codec, packed.ratio) == ("topk", 50.0)
    simulated = json.loads(isthmus("simulate", job, "--steps", "2", "--json").out)
    sent = 2 * 4 * sum(e.forward_wire_bytes + e.backward_wire_bytes for e in plan.replica.edges)
    assert sent <= sum(simulated["link_bytes"].values())
    assert simulated["closed_form_s"] == pytest.approx(plan.predicted.step_s)
    assert json.loads(isthmus("plan", job, "--compare", "even", "--json").out)["rows"][0]["step_s"] == pytest.approx(
        plan.predicted.step_s
    )
    assert isthmus("plan", job, "--verify", document).code == 0


def test_a_plan_document_keeps_its_codecs_and_may_name_others(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, fleet="three-sites"))
    prepared, fleet, document = prepare(job), fleet_of(job), tmp_path / "plan.json"
    asked = msgspec.structs.replace(job, compression=CompressionConfig(method="uniform", ratio=20.0))
    packed = plan_for(msgspec.structs.replace(prepared, job=asked), fleet)
    save_plan(packed, document)
    assert plan_for(prepared, fleet, document) == packed
    first, *others = packed.replica.edges
    other = msgspec.structs.replace(first, forward_compression=Compression(codec="int8", wire_bytes=1))
    edges = (other, *others)
    replicas = (msgspec.structs.replace(packed.replica, edges=edges),)
    save_plan(msgspec.structs.replace(packed, replicas=replicas), document)
    again = plan_for(prepared, fleet, document)
    made = again.replica.edges[0].forward_compression
    assert made is not None and made.codec == "int8" and made.wire_bytes > first.backward_wire_bytes
    assert again.replica.edges[1:] == packed.replica.edges[1:]
    assert "all figures were computed anew" in again.notes[-1]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('method = "adatop"', ["compression.method", "unknown method 'adatop'", "did you mean 'adatopk'"]),
        ('method = "uniform"\nratio = 0.5', ["compression.ratio", ">= 1"]),
        ("ratio = 5", ["compression", "method"]),
        ('method = "uniform"\nrate = 5', ["compression", "rate"]),
    ],
)
def test_bad_compression_is_refused(tmp_path: Path, table: str, words: list[str]) -> None:
    job = edited(write_job(tmp_path), ("[model]", f"[compression]\n{table}\n\n[model]"))
    refused(isthmus("plan", job), 2, *words)


@pytest.mark.long
def test_a_job_lets_the_plan_choose_how_many_micro_batches(tmp_path: Path) -> None:
    job = edited(
        write_job(tmp_path, steps=6, planner="auto"), ("[training]", "[plan]\nmicro_batches = [1, 2, 4]\n\n[training]")
    )
    document, run = tmp_path / "plan.json", tmp_path / "run"
    document.write_text(isthmus("plan", job, "--json").out)
    made = load_plan(document)
    assert (made.micro_batches, made.batch) != (8, 8) and made.batch == 8
    assert any("micro-batches" in note and "are best" in note for note in made.notes)
    assert isthmus("plan", job, "--verify", str(document)).code == 0
    assert isthmus("simulate", job, "--plan", str(document)).code == 0
    assert "micro-" in isthmus("plan", job, "--compare", "auto,even").out
    done = isthmus("train", job, "--run", run, "--json")
    assert done.code == 0, done
    assert load_plan(run / "plan.json").micro_batches == made.micro_batches
    edited(job, ("steps = 6", "steps = 8"))
    assert isthmus("train", job, "--run", run, "--resume").code == 0
    assert load_plan(run / "plan.json").micro_batches == made.micro_batches
    refused(isthmus("plan", edited(job, ("[1, 2, 4]", "[1, 3]"))), 2, "batch_size", "plan.micro_batches (3)")


def test_a_forged_gap_is_no_pass(tmp_path: Path) -> None:
    job, document = write_job(tmp_path), tmp_path / "plan.json"
    made = json.loads(isthmus("plan", job, "--planner", "even", "--json").out)
    reached = made["predicted"]["steady_s"]
    for gap in (made["certificate"]["gap"], 0.0001):
        made["certificate"] |= {"gap": gap, "lower_bound": reached / (1 + gap)}
        document.write_text(json.dumps(made))
        assert isthmus("plan", job, "--verify", document).code == (1 if gap == 0.0001 else 0)


def test_limits_are_given_on_the_command_line(tmp_path: Path) -> None:
    job = write_job(tmp_path, planner="chain")
    found = json.loads(isthmus("plan", job, "--objective", "cost", "--max-step", "10 min", "--json").out)
    assert found["constraints"] == {"objective": "cost", "max_step_s": 600.0, **found["constraints"]}
    assert json.loads(isthmus("plan", job, "--max-price", "7", "--json").out)["constraints"]["max_price"] == 7
    refused(isthmus("plan", job, "--max-step", "10 min"), 2, "max_step", "expected 'cost'")
    refused(isthmus("plan", job, "--objective", "cost", "--max-step", "1 ns"), 3, "max_step", "the fastest takes")
    refused(isthmus("plan", job, "--objective", "cost", "--max-step", "soon"), 2, "--max-step", "soon")
    refused(isthmus("plan", job, "--max-price", "0"), 2, "--max-price", "got 0")


def test_four_simulated_steps_that_overlap_state_the_step_that_their_plan_does(tmp_path: Path) -> None:
    """Of four steps alone the slope is a few percent off, even below what the slowest device computes."""
    job = edited(write_job(tmp_path, fleet="three-sites"), ("[model]", 'schedule = "delayed"\n\n[model]'))
    planned, document = isthmus("plan", job, "--json"), tmp_path / "plan.json"
    document.write_text(planned.out)
    stated_s = json.loads(planned.out)["predicted"]["steady_s"]
    for more in ((), ("--plan", document)):
        simulated = isthmus("simulate", job, *more, "--json")
        assert json.loads(simulated.out)["step_s"] == pytest.approx(stated_s, rel=2e-3), simulated.err
