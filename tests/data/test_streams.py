"""Parquet files and tar shards that are read block by block hold the samples that the files hold, at any position."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from shards import stream_of, texts, vectors, write_parquet, write_tar

from isthmus.data import ColumnSpec, Dataset, DataSpec, load_dataset, sample_order
from isthmus.data.clients import share_out
from isthmus.data.dataset import batch_at
from isthmus.data.description import describe, difference, joined_descriptions
from isthmus.data.partition import PartitionSpec
from isthmus.data.registry import allowed, check_kind
from isthmus.data.streams import tar_shards
from isthmus.data.streams.parquet_shards import ParquetShards
from isthmus.errors import StepError, UserError

ROWS = 180


def columns_of(form: str, folder: Path) -> tuple[str, dict[str, str]]:
    if form == "tar":
        return write_tar(folder), {"input": "npy", "target": "cls"}
    return write_parquet(folder), {"input": "x", "target": "y"}


@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_rows_are_those_of_the_files(form: str, tmp_path: Path) -> None:
    path, columns = columns_of(form, tmp_path)
    data = stream_of(path, columns=columns, holdout=0.0)
    assert data.columns == {"input": ColumnSpec(dtype="float32", shape=(4,)), "target": ColumnSpec(dtype="int64")}
    found = data.batch(range(ROWS), ["input", "target"])
    assert np.array_equal(found["input"].numpy(), vectors(ROWS)) and found["target"].tolist() == [
        row % 10 for row in range(ROWS)
    ]
    some = [179, 3, 3, 90, 0]
    assert torch.equal(data.batch(some, ["input"])["input"], found["input"][some])
    with pytest.raises(IndexError):
        data.batch([ROWS], ["input"])


@pytest.mark.parametrize("form", ["parquet", "tar"])
@pytest.mark.parametrize("kind", ["rows", "text"])
def test_any_position_equals_the_whole_stream(form: str, kind: str, tmp_path: Path) -> None:
    path, columns = columns_of(form, tmp_path)
    options: dict[str, object] = {"columns": columns}
    if kind == "text":
        options = {"text": "txt" if form == "tar" else "text", "sequence_length": 24}
    data = stream_of(path, shuffle_blocks=2, **options)
    names, order = list(data.columns), sample_order(data, 5)
    whole = batch_at(data, order, 0, 2 * len(data) + 9, names)
    for start in (0, 17, len(data) - 4, 2 * len(data) - 4):
        again = stream_of(path, shuffle_blocks=2, **options)
        piece = batch_at(again, sample_order(again, 5), start, 13, names)
        assert all(torch.equal(piece[name], whole[name][start : start + 13]) for name in names)


def test_train_and_heldout_share_the_blocks(tmp_path: Path) -> None:
    path = write_parquet(tmp_path)
    train, heldout = (stream_of(path, split, columns={"input": "x"}, holdout=0.3) for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (120, 60)
    found = [data.batch(range(len(data)), ["input"])["input"].numpy() for data in (train, heldout)]
    assert sorted(np.concatenate(found).tolist()) == sorted(vectors(ROWS).tolist())
    files = [str(tmp_path / f"train-{number}.parquet") for number in range(3)]
    apart = stream_of(files[:2], "heldout", columns={"input": "x"}, heldout_path=files[2])
    assert np.array_equal(apart.batch(range(60), ["input"])["input"].numpy(), vectors(ROWS)[120:])


@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_texts_are_rings_that_epochs_go_round(form: str, tmp_path: Path) -> None:
    """Over the epochs every token of a block comes equally often, at most one pass apart."""
    if form == "tar":
        path, column = write_tar(tmp_path, files=1, rows=30), "txt"
    else:
        path, column = write_parquet(tmp_path, files=1, rows=30, group=30), "text"
    data = stream_of(path, text=column, sequence_length=16, holdout=0.0)
    ring = "".join(f"{text}\n" for text in texts(30)).encode()
    assert len(data) == len(ring) // 16
    everything = b""
    for epoch in range(3):
        found = data.drawn(range(len(data)), ["input_ids", "labels"], 0, np.full(len(data), epoch))
        everything += bytes(found["input_ids"].flatten().tolist())
        assert torch.equal(found["labels"][:, :-1], found["input_ids"][:, 1:])
    assert everything == (ring * 3)[: len(everything)]


def test_a_promise_that_text_does_not_keep_is_filled_from_its_beginning(tmp_path: Path) -> None:
    """The first block is of short rows, the second one repeats a word: Parquet stores it once."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": [*texts(20), *["again and again"] * 20]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    data = stream_of(str(tmp_path / "a.parquet"), text="text", sequence_length=8, holdout=0.0)
    ids = data.batch(range(len(data)), ["input_ids"])["input_ids"]
    assert ids.shape == (len(data), 8) and bytes(ids[-1].tolist()) in b"again and again\n" * 3


def test_a_stage_reads_the_columns_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    inner = ParquetShards.numbers
    monkeypatch.setattr(
        ParquetShards, "numbers", lambda self, file, block, name: read.append(name) or inner(self, file, block, name)
    )
    data = stream_of(write_parquet(tmp_path), columns={"input": "x", "target": "y"})
    _ = len(data), data.fingerprint, data.layout
    assert not read
    batch_at(data, sample_order(data, 0), 0, 100, ["target"])
    assert set(read) == {"y"}


def test_a_block_is_read_once_in_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    inner = ParquetShards.numbers
    monkeypatch.setattr(
        ParquetShards,
        "numbers",
        lambda self, file, block, name: read.append((file, block)) or inner(self, file, block, name),
    )
    data = stream_of(write_parquet(tmp_path), columns={"input": "x"}, shuffle_blocks=3, holdout=0.0)
    assert data.columns
    del read[:]
    order = sample_order(data, 0)
    for start in range(0, len(data), 10):
        batch_at(data, order, start, 10, ["input"])
    assert len(set(read)) >= 8 and len(read) <= 9


def test_the_hub_streams_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_parquet(tmp_path / "data")
    shutil.copy(tmp_path / "data" / "train-0.parquet", tmp_path / "data" / "validation-0.parquet")
    options: dict[str, object] = {"path": str(tmp_path / "data"), "columns": {"input": "x", "target": "y"}}
    plain, streamed = (
        {s: load_dataset(DataSpec(kind="hub", options={**options, "streaming": on}), s) for s in ("train", "heldout")}
        for on in (False, True)
    )
    for split, data in plain.items():
        assert len(streamed[split]) == len(data) == (180 if split == "train" else 60)
        assert streamed[split].columns == data.columns
        found, expected = (d.batch(range(len(data)), ["input", "target"]) for d in (streamed[split], data))
        assert all(torch.equal(found[name], expected[name]) for name in found)
    with pytest.raises(UserError, match="split of hub"):
        load_dataset(DataSpec(kind="hub", options={**options, "streaming": True, "train_split": "trian"}), "train")


def test_the_hub_streams_tar_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = write_tar(tmp_path / "data")
    options = {"path": str(tmp_path / "data"), "streaming": True, "columns": {"input": "npy"}, "holdout": 0.0}
    data = load_dataset(DataSpec(kind="hub", options=options), "train")
    assert data.fingerprint == stream_of(path, columns={"input": "npy"}, holdout=0.0).fingerprint


def test_a_url_is_read_as_a_path_is(tmp_path: Path) -> None:
    system = pytest.importorskip("fsspec").filesystem("memory")
    path = write_parquet(tmp_path)
    for file in sorted(tmp_path.glob("*.parquet")):
        system.pipe(f"/set/{file.name}", file.read_bytes())
    here = stream_of(path, columns={"input": "x"})
    for url in ("memory://set/train-*.parquet", "memory://set/train-{0..2}.parquet", "memory://set"):
        there = stream_of(url, columns={"input": "x"})
        assert there.fingerprint == here.fingerprint
        assert torch.equal(there.batch([1, 50], ["input"])["input"], here.batch([1, 50], ["input"])["input"])
    assert len(stream_of(f"file://{path}", columns={"input": "x"})) == len(here)


class _Ranges(SimpleHTTPRequestHandler):
    """Serves ranges of the files in a folder, and counts bytes."""

    served = 0

    def do_GET(self) -> None:
        file = Path(self.translate_path(self.path))
        if not file.exists():
            self.send_error(404)
            return
        content = file.read_bytes()
        begin, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(begin) : int(end or len(content)) + 1]
        _Ranges.served += len(part)
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {begin}-{int(begin) + len(part) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)

    def do_HEAD(self) -> None:
        file = Path(self.translate_path(self.path))
        if not file.exists():
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(file.stat().st_size))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_of_a_file_behind_a_url_ranges_are_read(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x = np.random.default_rng(0).random((400, 1024), dtype=np.float32)
    table = arrow.table({"x": arrow.FixedSizeListArray.from_arrays(arrow.array(x.ravel()), 1024)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=20, compression="NONE", use_dictionary=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/a.parquet"
        data = stream_of(url, holdout=0.0, shuffle_blocks=1)
        assert len(data) == 400 and _Ranges.served < 300_000
        assert np.array_equal(data.batch([30, 31], ["x"])["x"].numpy(), x[30:32])
        assert _Ranges.served < 700_000 < (tmp_path / "a.parquet").stat().st_size
        with pytest.raises(UserError, match=r"b.parquet: nothing is there, or nobody answers"):
            stream_of(f"http://127.0.0.1:{server.server_port}/b.parquet")
    finally:
        server.shutdown()
        server.server_close()


def test_images_are_decoded_and_transformed(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for row in range(6):
            packed = io.BytesIO()
            pillow.fromarray(np.full((6, 8, 3), row * 40, np.uint8)).save(packed, "PNG")
            for ending, content in {"png": packed.getvalue(), "cls": b"%d" % row}.items():
                member = tarfile.TarInfo(f"{row}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    options: dict[str, object] = {"columns": {"pixel_values": "png", "labels": "cls"}, "holdout": 0.0}
    crop = [{"name": "RandomCrop", "size": 4}, {"name": "Normalize", "mean": [0.0] * 3, "std": [1.0] * 3}]
    data = stream_of(str(tmp_path / "a.tar"), transforms=crop, **options)
    assert data.columns["pixel_values"] == ColumnSpec(dtype="float32", shape=(3, 4, 4))
    found = data.batch(range(6), ["pixel_values", "labels"])
    assert torch.equal(found["pixel_values"][:, 0, 0, 0], torch.arange(6) * 40 / np.float32(255))
    assert found["labels"].tolist() == list(range(6))


def test_an_index_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("isthmus.data.streams.files.WORTH_BYTES", 0)
    monkeypatch.setattr("isthmus.data.streams.files._RACY_NS", -(1 << 60))
    path = write_tar(tmp_path / "data", files=2)
    before = stream_of(path, columns={"input": "npy"})
    with monkeypatch.context() as patch:
        patch.setattr("isthmus.data.streams.tar_shards._look_through", lambda file: pytest.fail("looked through again"))
        assert stream_of(path, columns={"input": "npy"}).fingerprint == before.fingerprint
    write_tar(tmp_path / "data", files=2, rows=50)
    assert len(stream_of(path, columns={"input": "npy"}, holdout=0.0)) == 100
    for file in (tmp_path / "cache").rglob("*.msgpack"):
        file.write_bytes(b"\xc1 damaged")
    assert len(stream_of(path, columns={"input": "npy"}, holdout=0.0)) == 100


def test_with_an_index_a_shard_is_looked_through_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path, files=3, rows=300)
    listed = [{"url": f"here/shard-{number:03d}.tar", "nsamples": 300, "filesize": 1} for number in range(3)]
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"wids_version": 1, "shardlist": listed}))
    looked: list[str] = []
    inner = tar_shards._look_through
    monkeypatch.setattr(tar_shards, "_look_through", lambda file: looked.append(file.url) or inner(file))
    options: dict[str, object] = {"columns": {"input": "npy"}, "index": str(index), "holdout": 0.0}
    data = stream_of(path, **options)
    assert len(data) == 900 and data.layout.runs == tuple([(1, 256), (1, 44)] * 3)
    assert [Path(url).name for url in looked] == ["shard-000.tar"], "for its columns"
    assert np.array_equal(data.batch([290, 310], ["input"])["input"].numpy(), vectors(900)[[290, 310]])
    assert [Path(url).name for url in looked] == ["shard-000.tar", "shard-001.tar"]
    index.write_text(json.dumps({"shardlist": [{**one, "nsamples": 301} for one in listed[:2]]}))
    with pytest.raises(UserError, match=r"option 'index': lists no shard-002.tar"):
        stream_of(path, **options)
    with pytest.raises(UserError, match="got 300 samples, the index says 301"):
        stream_of(str(tmp_path / "shard-000.tar"), **options)
    index.write_text("[]")
    with pytest.raises(UserError, match=r"cannot read .*index.json: Expected `object`, got `array`"):
        stream_of(path, **options)


def test_other_contents_have_another_fingerprint(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    options: dict[str, object] = {"columns": {"input": "x"}}
    here, copy = stream_of(path, **options), stream_of(str(tmp_path / "b" / "*.parquet"), **options)
    assert here.fingerprint == copy.fingerprint != stream_of(path, "heldout", **options).fingerprint
    write_parquet(tmp_path / "b", rows=61)
    assert stream_of(str(tmp_path / "b" / "*.parquet"), **options).fingerprint != here.fingerprint
    assert stream_of(path, columns={"input": "y"}).fingerprint != here.fingerprint


def test_a_description_has_the_layout(tmp_path: Path) -> None:
    options: dict[str, object] = {"path": write_parquet(tmp_path), "columns": {"a": "x"}}
    one, other = (
        describe(DataSpec(kind="stream", options={**options, "shuffle_blocks": blocks}), heldout=True)
        for blocks in (2, 3)
    )
    assert one.layout is not None and one.layout.samples == one.train == 160 and one.heldout == 20
    assert "shuffle_blocks" in (difference(one, other, counts=True) or "")
    with pytest.raises(UserError, match="a stream of d1 with"):
        joined_descriptions({"d1": one})


def test_a_federated_job_is_refused(tmp_path: Path) -> None:
    data: Dataset = stream_of(write_parquet(tmp_path), columns={"input": "x", "labels": "y"})
    with pytest.raises(UserError, match="got a stream in a federated job"):
        share_out(data, PartitionSpec(scheme="iid", clients=2), 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "nowhere/*.parquet"}, "no file matches 'nowhere"),
        ({"path": []}, "got none"),
        ({"path": "a/train-0.csv"}, r"expected a name that ends in .parquet or .tar"),
        ({"path": ["a/*.parquet", "t/*.tar"]}, "expected one format"),
        ({"path": "t/shard-{9..1}.tar"}, "expected a range that goes up"),
        ({"path": "zip://x::s3://y.parquet"}, "one URL without '::'"),
        ({"path": "nosuch://y.parquet"}, "cannot read nosuch://y.parquet: Protocol not known"),
        ({"path": "a/broken.parquet"}, "cannot read a/broken.parquet"),
        ({"path": "a/broken.tar", "text": "txt"}, "cannot read a/broken.tar"),
        ({"path": "a/train-*.parquet", "text": "txet"}, "unknown column of a/train-0.parquet 'txet': did you mean"),
        ({"path": "t/*.tar", "text": "text"}, "unknown column of t/shard-000.tar"),
        ({"path": "a/train-*.parquet", "columns": {"a": "xx"}}, "unknown column of a/train-0.parquet"),
        ({"path": "a/train-*.parquet", "columns": {"a": "note"}}, "'note': holds neither numbers nor images"),
        ({"path": "a/train-*.parquet", "columns": {"a": "x"}, "text": "text"}, "columns': got them beside text"),
        ({"path": "one/train-0.parquet"}, "1 cannot be divided: expected at least 2, or holdout = 0"),
        ({"path": "a/train-*.parquet", "index": "a.json"}, "'index': got 'a.json' for Parquet files, expected none"),
        (
            {"path": "t/*.tar", "columns": {"a": "cls"}, "index": "a.json"},
            "cannot read a.json: No such file",
        ),
        ({"path": "a/train-*.parquet", "shuffle_blocks": 0}, "shuffle_blocks"),
    ],
)
def test_what_is_refused(
    options: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_parquet(Path("a"))
    write_parquet(Path("one"), files=1, group=60)
    write_tar(Path("t"))
    Path("a/train-0.csv").write_text("x\n1\n")
    for name in ("a/broken.parquet", "a/broken.tar"):
        Path(name).write_bytes(b"no shard" * 100)
    with pytest.raises(UserError, match=words) as refused:
        load_dataset(DataSpec(kind="stream", options=options), "train")
    assert "\n" not in str(refused.value)


def test_what_is_damaged_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in {"0.npy": b"no array", "0.txt": b"", "1.npy": b"", "2.txt": b"\n"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with pytest.raises(UserError, match=r"a.tar: sample 2 has no 'npy'"):
        stream_of(str(path), columns={"a": "npy"}, holdout=0.0).batch([0], ["a"])
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, values in {"ragged": [[1], [1, 2]], "absent": [1, None]}.items():
        parquet.write_table(arrow.table({"a": values}), tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match="rows differ in shape"):
        stream_of(str(tmp_path / "ragged.parquet"), holdout=0.0).batch([0], ["a"])
    with pytest.raises(UserError, match=r"absent\.parquet column 'a', row 2: got null"):
        stream_of(str(tmp_path / "absent.parquet"), holdout=0.0).batch([0], ["a"])
    parquet.write_table(arrow.table({"text": ["a", "b", None]}), tmp_path / "texts.parquet", row_group_size=2)
    with pytest.raises(UserError, match=r"texts\.parquet column 'text', row 3: got null, expected texts"):
        texts = stream_of(str(tmp_path / "texts.parquet"), text="text", sequence_length=1, holdout=0.0)
        texts.batch(range(len(texts)), ["input_ids"])


def test_a_url_is_fetched_for_nobody_else_unless_the_owner_names_the_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = DataSpec(kind="stream", options={"path": "s3://bucket/*.parquet"})
    with pytest.raises(UserError, match="nothing is fetched for somebody else"):
        check_kind(remote, None, foreign=True)
    check_kind(remote, ("stream",), foreign=True)
    check_kind(remote, None, foreign=False)
    folder = tmp_path / "own"
    write_parquet(folder)
    write_parquet(tmp_path / "secret")
    monkeypatch.chdir(folder)
    (folder / "link.parquet").symlink_to(tmp_path / "secret" / "train-0.parquet")
    kinds = ("stream",)
    with allowed(DataSpec(kind="stream", options={"path": "train-*.parquet"}), kinds, foreign=True):
        assert len(stream_of("train-*.parquet", columns={"a": "x"}))
        with pytest.raises(UserError, match="leads out of this device's data folder"):
            stream_of("link.parquet", columns={"a": "x"})
        with pytest.raises(UserError, match=r"got 'file://.*', expected one of: abfs"):
            stream_of(f"file://{tmp_path}/secret/train-0.parquet")
        with pytest.raises(UserError, match=r"got 'memory://x.parquet', expected one of: abfs"):
            stream_of("memory://x.parquet")


def test_a_block_without_text_is_named(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["", ""]}), tmp_path / "a.parquet")
    data = stream_of(str(tmp_path / "a.parquet"), text="text", sequence_length=1, holdout=0.0)
    assert bytes(data.batch([0], ["input_ids"])["input_ids"].flatten().tolist()) == b"\n"
    tokenizer = pytest.importorskip("tokenizers")
    made = tokenizer.Tokenizer(tokenizer.models.WordLevel({"word": 0}, unk_token="word"))
    made.pre_tokenizer = tokenizer.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StepError, match="block 0 holds no text"):
        stream_of(str(tmp_path / "a.parquet"), text="text", tokenizer=str(tmp_path), holdout=0.0)


def write_members(path: Path, members: Sequence[tuple[str, bytes]]) -> str:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return str(path)


def test_tar_shards_are_read_as_webdataset_and_datasets_read_them(tmp_path: Path) -> None:
    """`datasets` is asked; what webdataset 1.0.2 gives is the same, and written down here."""
    members: list[tuple[str, bytes]] = []
    for row, written in enumerate([b"007", b"-3\n", b" +12 ", b"0"]):
        members += [(f"a.b/{row:02d}.CLS", written), (f"a.b/{row:02d}.pair.json", b"[%d, 1.5]" % row)]
    path = write_members(tmp_path / "a.tar", members)
    data = stream_of(path, columns={"label": "cls", "pair": "pair.json"}, holdout=0.0)
    found = data.batch(range(4), ["label", "pair"])
    assert found["label"].tolist() == [7, -3, 12, 0] and found["pair"].tolist() == [[row, 1.5] for row in range(4)]
    tar = pytest.importorskip("datasets.packaged_modules.webdataset.webdataset").WebDataset
    pairs = [(name.replace("CLS", "cls"), io.BytesIO(content)) for name, content in members]
    theirs = list(tar._get_pipeline_from_tar(path, iter(pairs)))
    assert [one["cls"] for one in theirs] == found["label"].tolist()
    assert [one["pair.json"] for one in theirs] == found["pair"].tolist()


def test_one_name_twice_in_a_sample_is_refused(tmp_path: Path) -> None:
    """As webdataset and datasets refuse it; after another sample the name is a new one, as there."""
    path = write_members(tmp_path / "a.tar", [("0.cls", b"1"), ("0.txt", b"a"), ("0.cls", b"2")])
    with pytest.raises(UserError, match=r"a\.tar: member 0\.cls: sample '0' has 'cls' twice, expected each name once"):
        stream_of(path, columns={"a": "cls"}, holdout=0.0)
    apart = write_members(tmp_path / "b.tar", [("0.cls", b"1"), ("1.cls", b"2"), ("0.cls", b"3")])
    assert stream_of(apart, columns={"a": "cls"}, holdout=0.0).batch(range(3), ["a"])["a"].tolist() == [1, 2, 3]


def test_members_that_are_part_of_no_sample_are_named(tmp_path: Path) -> None:
    others = ["README", ".hidden.cls", "__odd.cls", "part/LICENSE", "__meta__/a.cls", "__info__"]
    path = write_members(tmp_path / "a.tar", [*[(name, b"1") for name in others], ("0.cls", b"5")])
    words = r"a\.tar: 4 members are part of no sample .*: README, \.hidden\.cls, __odd\.cls, \.\.\."
    with pytest.warns(UserWarning, match=words):
        data = stream_of(path, columns={"a": "cls"}, holdout=0.0)
    assert data.batch([0], ["a"])["a"].tolist() == [5]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("0.cls", b"1.5", r"column 'cls' \(sample 0\): invalid literal for int"),
        (
            "0.json",
            b"18446744073709551615",
            r"column 'json': got 18446744073709551615, expected whole",
        ),
        ("0.json", b"[1, null]", r"column 'json' \(sample 0\): got object, expected numbers"),
    ],
)
def test_numbers_of_a_tar_that_are_none_are_refused(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    path = write_members(tmp_path / "a.tar", [(name, content)])
    with pytest.raises(UserError, match=words):
        stream_of(path, holdout=0.0).batch([0], [name[2:]])


def unlike(count: int, *, seed: int = 0) -> list[str]:
    return [f"{text} {number}" for number, text in enumerate(texts(count, seed))]


@pytest.mark.parametrize("first", ["repeats", "all", "few"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_a_block_has_the_windows_of_its_text_however_it_is_stored(first: str, dictionary: bool, tmp_path: Path) -> None:
    """A dictionary holds texts that repeat once; what an epoch takes of a block follows from how much text it is."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    blocks = {"repeats": unlike(7) * 60, "all": unlike(420, seed=1), "few": [*unlike(400, seed=2), *["sea"] * 20]}
    order = [first, *(name for name in blocks if name != first)]
    table = arrow.table({"other": list(range(1260)), "text": [text for name in order for text in blocks[name]]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=420, use_dictionary=dictionary)
    data = stream_of(str(tmp_path / "a.parquet"), text="text", sequence_length=8, holdout=0.0)
    for block, name in zip(data._blocks, order, strict=True):
        expected = sum(len(text) + 1 for text in blocks[name]) / 8
        assert block.samples == pytest.approx(expected, rel=0.06), name
    assert data._blocks[0].samples == sum(len(text) + 1 for text in blocks[first]) // 8


def test_texts_of_a_dictionary_that_grew_too_large_count_too(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    found = unlike(900)
    path = tmp_path / "a.parquet"
    table = arrow.table({"text": [*["a text that comes again"] * 900, *found]})
    parquet.write_table(table, path, row_group_size=900, dictionary_pagesize_limit=20_000, write_batch_size=100)
    data = stream_of(str(path), text="text", sequence_length=8, holdout=0.0)
    assert data._blocks[1].samples == pytest.approx(sum(len(text) + 1 for text in found) / 8, rel=0.04)


def test_texts_of_a_tar_that_are_no_utf8_are_refused_for_a_tokenizer(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = write_members(tmp_path / "a.tar", [("0.txt", b"the cat"), ("1.txt", "the caf\xe9 sat".encode("latin1"))])
    words = r"a\.tar column 'txt', block 0, text 2: byte 0xe9 before b' sat.n' is no UTF-8, expected text in UTF-8"
    with pytest.raises(UserError, match=words):
        stream_of(path, text="txt", tokenizer=str(tokenizer_dir), sequence_length=2, holdout=0.0)
