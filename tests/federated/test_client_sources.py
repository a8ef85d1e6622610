"""Clients from text files and from a Hugging Face data set on disk; and the simulator's command."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from isthmus.api.serving_fleet import address_of
from isthmus.data import DataSpec, load_dataset
from isthmus.data.availability import read_availability
from isthmus.data.clients import TextClients, share_out
from isthmus.data.partition import PartitionSpec
from isthmus.data.text import TextOptions
from isthmus.errors import UserError
from isthmus.federated.admission import Guarantee
from isthmus.federated.evaluation import RoundHistory
from isthmus.federated.job import client_data, load_federated_job
from isthmus.federated.states import StateForm, StateStore
from isthmus.overrides import overridden
from isthmus.scaffold import check_count
from tests.federated.sites import model, samples, write_job
from tests.runtime.commands import edited, isthmus, refused


def texts(folder: Path, **files: str) -> TextOptions:
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)
    return TextOptions(files=f"{folder}/*.txt", sequence_length=4, holdout=0)


def text_clients(options: TextOptions) -> TextClients:
    return TextClients(msgspec.structs.replace(options, holdout=0.3))


def test_a_client_per_file(tmp_path: Path) -> None:
    options = texts(tmp_path, a="abcdefgh!", b="hello, world", c="x" * 50, d="12345678901234")
    clients = text_clients(options)
    assert len(clients.sizes) == 3, "one is held out"
    names = [path.stem for path in clients._paths]
    expected = {"a": 2, "b": 2, "c": 12, "d": 3}
    assert clients.sizes.tolist() == [expected[name] for name in names]
    found = clients.load(names.index("d"))
    assert bytes(found["input_ids"].flatten().tolist()) == b"123456789012"
    assert bytes(found["labels"].flatten().tolist()) == b"234567890123"
    assert found["labels"].dtype == torch.int64
    assert clients.fingerprint == text_clients(options).fingerprint
    (tmp_path / "d.txt").write_text("other length")
    assert clients.fingerprint != text_clients(options).fingerprint
    with pytest.raises(UserError, match=r"d\.txt has changed since the run began"):
        clients.load(names.index("d"))


def test_a_client_without_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"client 0 has no data: .*txt holds 4 tokens, expected at least .* = 5"):
        text_clients(texts(tmp_path, a="four", b="five", c="nine"))


def test_the_job_of_a_text_folder(tmp_path: Path) -> None:
    texts(tmp_path, a="abcdefgh!", b="hello, world", c="x" * 50)
    text = write_job(tmp_path, ("s",)).read_text()
    head, _, tail = text.partition("[data]")
    options = f'{{ files = "{tmp_path}/*.txt", sequence_length = 4, holdout = 0.3 }}'
    job = tmp_path / "text.toml"
    job.write_text(
        f'{head}[data]\nkind = "text"\noptions = {options}\n[federated.partition]\nscheme = "files"\n'
        f"[federated]{tail.partition('[federated]')[2]}"
    )
    assert len(client_data(load_federated_job(job)).sizes) == 2
    digits = edited(job, ('kind = "text"', 'kind = "digits"'), (f"options = {options}", "options = {}"))
    with pytest.raises(UserError, match="got 'files' for data that are no text"):
        client_data(load_federated_job(digits))


# A data set on disk


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("disk") / "saved"
    rows = 40
    table = datasets.Dataset.from_dict(
        {
            "who": [f"writer-{i * 7 % 5}" for i in range(rows)],
            "number": [i * 7 % 5 for i in range(rows)],
            "pixels": [[[i, 1.5], [2.0, 3.0]] for i in range(rows)],
            "label": list(range(rows)),
            "text": ["t"] * rows,
        }
    )
    table.save_to_disk(str(folder))
    return folder


def spec(saved: Path, **options: object) -> DataSpec:
    return DataSpec(kind="disk", options={"path": str(saved), "holdout": 0, **options})


def test_rows_come_from_disk_by_name(saved: Path) -> None:
    found = load_dataset(spec(saved, columns={"x": "pixels", "labels": "label"}), "train")
    assert len(found) == 40
    assert found.columns["x"].shape == (2, 2)
    batch = found.batch([3, 39, 0], ["x", "labels"])
    assert batch["labels"].tolist() == [3, 39, 0]
    assert batch["x"][1].tolist() == [[39, 1.5], [2, 3]]
    assert set(load_dataset(spec(saved), "train").columns) == {"number", "pixels", "label"}


def test_held_out_rows_are_no_training_rows(saved: Path) -> None:
    both = [load_dataset(spec(saved, holdout=0.25), split) for split in ("train", "heldout")]
    labels = [set(one.batch(np.arange(len(one)), ["label"])["label"].tolist()) for one in both]
    assert (len(labels[0]), len(labels[1])) == (30, 10)
    assert labels[0] | labels[1] == set(range(40))
    assert both[0].fingerprint != both[1].fingerprint


@pytest.mark.parametrize("column", ["who", "number"])
def test_a_column_says_whose_a_row_is(saved: Path, column: str) -> None:
    shared = share_out(load_dataset(spec(saved), "train"), PartitionSpec(scheme="natural", column=column), 0)
    assert shared.sizes.tolist() == [8] * 5
    for client in range(5):
        assert {int(label) * 7 % 5 for label in shared.load(client)["label"]} == {client}
    assert column not in shared.columns


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": {"x": "pixel"}}, "unknown column .*'pixel': did you mean 'pixels'"),
        ({"columns": {"x": "text"}}, "column 'text': got .*, expected numbers"),
        ({"path": "/nowhere"}, "no directory /nowhere"),
        ({"path": "."}, "cannot read"),
        ({"holdout": 2}, "holdout"),
    ],
)
def test_what_cannot_be_read_is_said(saved: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_dataset(spec(saved, **options), "train")


def test_a_column_that_owns_nothing(saved: Path) -> None:
    dataset = load_dataset(spec(saved), "train")
    with pytest.raises(UserError, match=r"unknown column .*'whom': did you mean 'who'"):
        share_out(dataset, PartitionSpec(scheme="natural", column="whom"), 0)
    with pytest.raises(UserError, match="column 'pixels'"):
        share_out(dataset, PartitionSpec(scheme="natural", column="pixels"), 0)


# The command, and what remains of bad input


def test_a_federated_job_is_simulated(tmp_path: Path) -> None:
    job = edited(
        write_job(tmp_path, ("a", "b", "c", "d"), "scaffold"),
        ("[runtime]", "[runtime]\nexecutors = 2\nslow_down = [0.0, 3.0]"),
    )
    job.write_text(job.read_text().partition("[federated.deployment]")[0])  # whose sites would be simulated
    done = isthmus("simulate", job, "--json")
    assert done.code == 0, done.err
    broadcast = msgspec.json.decode(done.out)
    assert (broadcast["rounds"], broadcast["executors"]) == (4, 2)
    assert 0 < broadcast["round_s"] < broadcast["total_s"]
    assert "round time" in isthmus("simulate", job).out
    refused(isthmus("simulate", job, "--fleet", "laptop"), 2, "--fleet", "federated job")


IMAGES = """
name = "images"
[model]
name = "cnn"
options = { width = 4, stages = 1, classes = 62, batch_norm = true }
[data]
kind = "femnist"
options = { writers = 6 }
[federated]
rounds = 1
[federated.participation]
clients = 3
"""


def test_a_model_with_running_means_is_simulated(tmp_path: Path) -> None:
    (tmp_path / "fed.toml").write_text(IMAGES)
    done = isthmus("simulate", tmp_path / "fed.toml")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([("[runtime]", '[federated.participation]\nfraction = 1.0\navailability = "no.csv"\n[runtime]')], ["no.csv"]),
        (
            [("[runtime]", '[federated.aggregation]\nrule = "krum"\n[runtime]')],
            ["federated.participation.minimum: got 1", "5 for krum"],
        ),
        (
            [
                (
                    "[runtime]",
                    "[federated.participation]\nfraction = 1.0\nminimum = 3\n"
                    '[federated.aggregation]\nrule = "trimmed_mean"\n[runtime]',
                )
            ],
            ["federated.participation.minimum: got 3", "at least 10 for trimmed_mean with trim = 0.1"],
        ),
        (
            [("[runtime]", '[federated.aggregation]\nrule = "median"\n[runtime]'), ('"fedavg"', '"scaffold"')],
            ["federated.aggregation.rule: got 'median' with an algorithm whose server adds up what clients keep"],
        ),
        (
            [("[runtime]", "[privacy]\nclip = 1.0\nnoise_multiplier = 1.0\n[runtime]"), ('"fedavg"', '"fednova"')],
            ["federated.algorithm: got fednova, which returns 'steps', beside [privacy]"],
        ),
        (
            [("[runtime]", '[federated.aggregation]\nrule = "mean"\n[runtime]')],
            ["federated.aggregation.rule", "'mean'"],
        ),
        (
            [
                (
                    "[runtime]",
                    '[federated.aggregation]\nrule = "median"\n'
                    "[privacy]\nclip = 1.0\nnoise_multiplier = 1.0\n[runtime]",
                )
            ],
            ["federated.aggregation.rule: got 'median' beside [privacy]"],
        ),
        ([("[runtime]", "[privacy]\nclip = 0.0\nnoise_multiplier = 1.0\n[runtime]")], ["privacy.clip"]),
        (
            [("[runtime]", "[federated.participation]\nfraction = 0.5\npoisson = true\nweighted = true\n[runtime]")],
            ["federated.participation: got weighted beside federated.participation.poisson"],
        ),
        ([("all.npz", "none.npz")], ["no file"]),
        (
            [('column = "client"', 'column = "owner"')],
            ["no column 'owner'", "it has: client, labels, pixel_values"],
        ),
        (
            [("[runtime]", "[federated.participation]\nclients = 2\nminimum = 3\n[runtime]")],
            ["federated.participation.minimum: got 3, expected at most the 2 clients of a round"],
        ),
        (
            [("[runtime]", "[federated.participation]\nclients = 2\npoisson = true\nstaleness = 1\n[runtime]")],
            ["federated.participation.staleness: got 1 beside federated.participation.poisson"],
        ),
        (
            [
                ("[runtime]", "[federated.participation]\nclients = 2\nstaleness = 1\n[runtime]"),
                ('"fedavg"', '"scaffold"'),
            ],
            ["federated.participation.staleness: got 1 with an algorithm whose clients keep something"],
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(changes: list[tuple[str, str]], words: list[str], tmp_path: Path) -> None:
    job = edited(write_job(tmp_path, ("a", "b", "c")), *changes)
    refused(isthmus("train", job, "--scheme", "sp", "--run", tmp_path / "run"), 2, *words)


def test_rounds_without_enough_available_clients_are_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "when.csv").write_text("client, from, to\n0, 0, 150\n2, 0, 1000\n1, 130, 1000\n")
    when = f'[federated.participation]\nfraction = 1.0\nminimum = 2\navailability = "{tmp_path}/when.csv"\n[runtime]'
    job = edited(write_job(tmp_path, ("a", "b", "c")), ("[runtime]", when))
    done = isthmus("train", job, "--scheme", "sp", "--run", tmp_path / "run")
    assert done.code == 0, done.err
    (tmp_path / "when.csv").write_text("client, from, to\n0, 0, 150\n2, 0, 1000\n1, 190, 1000\n")
    refused(
        isthmus("train", job, "--scheme", "sp", "--run", tmp_path / "late"),
        2,
        "in round 4 1 clients are available, expected at least 2",
    )


@pytest.mark.parametrize(
    "row, said",
    [
        (f"{'9' * 5000}, 0, 1", "line 2: client: got '9999.*', expected a number below 3"),
        (f"0, 0, {'9' * 5000}", "line 2: to: got '9999.*', expected a finite number of seconds"),
        ("0, nan, 1", "line 2: from: got 'nan', expected a finite number of seconds"),
        ("0, 0, inf", "line 2: to: got 'inf', expected a finite number of seconds"),
        (f"0, 0, {'9' * 200_000}", "cannot be read: field larger than field limit"),
    ],
    ids=["client", "to", "nan", "inf", "field"],
)
def test_a_number_that_is_none_names_its_file_line_and_field(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "when.csv"
    path.write_text(f"client, from, to\n{row}\n")
    with pytest.raises(UserError, match=rf"federated.participation.availability: .*when.csv: {said}") as caught:
        read_availability(path, 3, 1.0)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_a_number_of_thousands_of_digits_is_no_number_of_anything() -> None:
    """Python's int refuses it by a ValueError."""
    many = "9" * 5000
    with pytest.raises(UserError, match=r"expected a key of a table, or the number of one of 1"):
        overridden({"optimizer": [{"lr": 1.0}]}, {f"optimizer.{many}.lr": 2.0}, "job")
    with pytest.raises(UserError, match="expected a whole number from 1"):
        check_count(many)
    with pytest.raises(UserError, match=r"port: got .*, expected a number up to 65535"):
        address_of(f"host:{many}", 1)


def test_a_batch_that_is_larger_than_every_client_is_said(tmp_path: Path) -> None:
    job = write_job(tmp_path, ("a", "b"))
    largest = max(len(samples(client)["labels"]) for client in range(2))
    for batch in (largest, largest + 1):
        done = isthmus(
            "train", job, "--rounds", "1", "--run", tmp_path / f"{batch}", "--set", f"training.batch_size={batch}"
        )
        said = f"training.batch_size: got {batch}, and no client has more than {largest} samples"
        assert done.code == 0 and (said in done.err) == (batch > largest), done.err


PRIVATE = ("[runtime]", "[privacy]\nclip = 0.5\nnoise_multiplier = 1.0\n[runtime]")


def test_privacy_without_its_library_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    job = edited(write_job(tmp_path, ("a", "b", "c")), PRIVATE)
    refused(isthmus("train", job, "--scheme", "sp", "--run", tmp_path / "run"), 2, "pip install '.[privacy]'")
    assert not (tmp_path / "run").exists()


def test_epsilon_as_a_key_says_what_it_follows_from(tmp_path: Path) -> None:
    job = edited(write_job(tmp_path, ("a", "b", "c")), ("[runtime]", "[privacy]\nclip = 1\nepsilon = 3\n[runtime]"))
    refused(isthmus("train", job), 2, "'privacy.epsilon': epsilon follows from privacy.noise_multiplier", "--dry-run")
    elsewhere = "'federated.epsilon': epsilon follows from privacy.noise_multiplier"
    refused(isthmus("train", write_job(tmp_path, ("a",)), "--set", "federated.epsilon=3"), 2, elsewhere)


def test_a_private_run_is_noisy_and_says_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def promised(privacy: object, rounds: int, passes: int, probability: float | None, unsampled: int) -> Guarantee:
        asked.append((rounds, passes, probability))
        return Guarantee(epsilon=3.5, delta=1e-5, rounds=rounds, sampling_probability=probability)

    monkeypatch.setattr("isthmus.federated.accounting.guarantee", promised)
    job = edited(write_job(tmp_path, ("a", "b", "c")), PRIVATE)
    models = []
    shown = isthmus("train", job, "--dry-run")
    assert "privacy: epsilon 3.5 at delta 1e-05 after 4 rounds, for all data of each client" in shown.out
    asked.clear()
    for name in ("one", "two"):
        done = isthmus("train", job, "--scheme", "sp", "--run", tmp_path / name)
        assert done.code == 0, done.err
        assert "privacy: epsilon 3.5 at delta 1e-05 after 4 rounds" in done.err
        assert "privacy: epsilon 3.5 at delta 1e-05 after 4 rounds" in done.out
        assert msgspec.json.decode((tmp_path / name / "privacy.json").read_bytes())["epsilon"] == 3.5
        models.append(model(tmp_path / name))
    assert not torch.equal(*models)
    edited(job, ("[privacy]", "[federated.participation]\nfraction = 0.5\npoisson = true\n[privacy]"))
    job.write_text(job.read_text().partition("[federated.deployment]")[0])  # of sites, who is here decides who is drawn
    assert isthmus("train", job, "--scheme", "sp", "--run", tmp_path / "three").code == 0
    assert asked == [(4, 1, None), (4, 1, None), (4, 1, 2 / 3)]


def test_states_of_another_run_are_refused(tmp_path: Path) -> None:
    store = StateStore(tmp_path, StateForm({"c": torch.ones(1)}))
    (place,) = store.write([1], 0, {"c": torch.ones(1, 1)})
    store.flush()
    with pytest.raises(UserError, match="missing: the folder is of another run"):
        store.read([1], [1 << 20])
    with pytest.raises(UserError, match="place 0 does not hold client 2's: the folder is of another run"):
        store.read([2], [place])


# Clients of one sample


BATCH_NORM = """
from torch import nn

class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, pixel_values, labels):
        logits = self.head(self.norm(pixel_values))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
"""


def normed_job(folder: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], **local: object) -> Path:
    """Clients with so many samples, and a model that cannot train on one."""
    (folder / "normed_model.py").write_text(BATCH_NORM)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    job = write_job(folder, ("a",), rounds=3)
    rows = sum(counts)
    draws = np.random.default_rng(0)
    values = draws.standard_normal((rows, 6)).astype(np.float32)
    np.savez(
        folder / "all.npz",
        pixel_values=values,
        labels=np.arange(rows) % 3,
        client=np.repeat(range(len(counts)), counts),
    )
    job.write_text(job.read_text().partition("[federated.deployment]")[0])
    model_ = 'name = "mlp"\noptions = { features = 6, width = 5, layers = 1, classes = 3 }'
    tables = "\n".join(f"{key} = {str(value).lower()}" for key, value in local.items())
    return edited(job, (model_, 'name = "normed_model:Normed"'), ("batch_size = 4", f"batch_size = 4\n{tables}"))


@pytest.mark.parametrize(
    ("counts", "local", "words"),
    [
        (
            (8, 1),
            {"drop_last": True},
            "it has one sample: federated.participation.min_samples = 2 leaves such clients out",
        ),
        ((8, 5), {}, "its last batch is one sample: training.drop_last = true leaves it out"),
    ],
)
def test_a_client_that_batch_norm_cannot_train_on_is_told_what_helps(
    counts: tuple[int, ...], local: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = normed_job(tmp_path, monkeypatch, counts, **local)
    refused(isthmus("train", job, "--scheme", "sp", "--run", tmp_path / "run"), 2, f"client 1 ({words})")


def test_clients_with_too_few_samples_take_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = normed_job(tmp_path, monkeypatch, (8, 1, 7), drop_last=True)
    edited(job, ("[runtime]", "[federated.participation]\nfraction = 1.0\nmin_samples = 2\n[runtime]"))
    done = isthmus("train", job, "--scheme", "sp", "--run", tmp_path / "run")
    assert done.code == 0, done.err
    lines = RoundHistory.of(tmp_path / "run").lines()
    assert [sorted(t.client for timed in line.record.trained.values() for t in timed) for line in lines] == [[0, 2]] * 3
    edited(job, ("min_samples = 2", "min_samples = 9"))
    words = "federated.participation.min_samples: got 9, and 0 of 3 clients have as many, expected at least 1"
    refused(isthmus("train", job, "--scheme", "sp", "--run", tmp_path / "other"), 2, words)
