import gzip
from pathlib import Path

import pytest
import torch

from isthmus.data import ColumnSpec, Dataset, DataSpec, Split, load_dataset
from isthmus.data.clients import TextClients
from isthmus.data.text import TextOptions, _stdlib_files, load_text
from isthmus.errors import UserError


def load(split: Split = "train", **options: object) -> Dataset:
    return load_dataset(DataSpec(kind="text", options=options), split)


def text_of(data: Dataset) -> bytes:
    """The split's text, as far as its windows reach."""
    batch = data.batch(range(len(data)), ["input_ids", "labels"])
    return bytes([*batch["input_ids"].flatten().tolist(), batch["labels"][-1, -1].item()])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(20):
        path = tmp_path / "texts" / str(number % 2) / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * 64)
    return tmp_path / "texts"


def test_windows_of_one_file(tmp_path):
    (tmp_path / "a").write_bytes(b"abcdefghijk")
    data = load(files=str(tmp_path / "a"), sequence_length=3, holdout=0)
    assert data.columns == {name: ColumnSpec(dtype="int64", shape=(3,), limit=256) for name in data.columns}
    assert len(data) == 3
    batch = data.batch([2, 0], ["labels", "input_ids"])
    assert list(batch) == ["labels", "input_ids"] and batch["labels"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [list(b"ghi"), list(b"abc")]
    assert batch["labels"].tolist() == [list(b"hij"), list(b"bcd")]


def test_labels_for_models_that_shift_them_themselves(tmp_path):
    (tmp_path / "a").write_bytes(b"abcdefghijk")
    data = load(files=str(tmp_path / "a"), sequence_length=3, holdout=0, shift_labels=False)
    batch = data.batch(range(3), ["input_ids", "labels"])
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_one_file_is_held_out_by_position(tmp_path):
    text = bytes(range(200))
    (tmp_path / "a").write_bytes(text)
    train, heldout = (load(s, files=str(tmp_path / "a"), sequence_length=9, holdout=0.1) for s in ("train", "heldout"))
    assert text_of(train) == text[:172]  # 180 bytes, of which 19 windows of 9 and one more byte are used
    assert text_of(heldout) == text[180:199]


@pytest.mark.parametrize(("holdout", "count"), [(0.05, 1), (0.5, 10), (0.001, 1), (0.99, 19)])
def test_train_and_heldout_share_no_file(folder, holdout, count):
    sets = [
        set(text_of(load(split, files=f"{folder}/**/*.txt", sequence_length=7, holdout=holdout)))
        for split in ("train", "heldout")
    ]
    assert not sets[0] & sets[1]
    assert sets[0] | sets[1] == set(range(20))
    assert len(sets[1]) == count


def test_split_and_fingerprint_do_not_depend_on_where_the_files_lie(folder, tmp_path):
    before = {s: load(s, files=f"{folder}/**/*.txt", sequence_length=7).fingerprint for s in ("train", "heldout")}
    folder.rename(tmp_path / "moved")
    patterns = [f"{tmp_path}/moved/1/*.txt", f"{tmp_path}/moved/**/*.txt"]
    after = {s: load(s, files=patterns, sequence_length=7).fingerprint for s in ("train", "heldout")}
    assert before == after and before["train"] != before["heldout"]


def test_fingerprint_knows_content_and_settings(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"a" * 100)
    first = load(files=str(path), sequence_length=4)
    assert first.fingerprint == load(files=str(path), sequence_length=4).fingerprint
    assert first.fingerprint != load(files=str(path), sequence_length=5).fingerprint
    assert first.fingerprint != load(files=str(path), sequence_length=4, shift_labels=False).fingerprint
    path.write_bytes(b"a" * 99 + b"b")
    assert first.fingerprint == load(files=str(path), sequence_length=4).fingerprint  # the b is held out
    path.write_bytes(b"b" + b"a" * 99)
    assert first.fingerprint != load(files=str(path), sequence_length=4).fingerprint


def test_max_bytes_bounds_each_split_and_moves_no_file(folder):
    pattern = f"{folder}/**/*.txt"
    for split in ("train", "heldout"):
        limited = load(split, files=pattern, sequence_length=1, holdout=0.5, max_bytes=100)
        whole = text_of(load(split, files=pattern, sequence_length=1, holdout=0.5))
        assert text_of(limited) == whole[:100]


def test_standard_library_source():
    data = load(files="stdlib", max_bytes=200_000, sequence_length=64)
    assert len(data) == (200_000 - 1) // 64
    assert b"import" in text_of(data)
    names = set(_stdlib_files())
    assert "ast.py" in names and "json/decoder.py" in names
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "test", "tests", "__pycache__", "idle_test"}
    assert not any(name.startswith("_sysconfigdata") for name in names)
    assert load("heldout", files="stdlib", max_bytes=9_000).fingerprint != data.fingerprint


def test_hugging_face_tokenizer(tmp_path, tokenizer_dir):
    (tmp_path / "a").write_text("the cat sat the dog ran the bird")
    data = load(files=str(tmp_path / "a"), tokenizer=str(tokenizer_dir), sequence_length=7, holdout=0)
    assert data.batch([0], ["input_ids"])["input_ids"].tolist() == [[4, 5, 6, 4, 7, 8, 4]]
    assert data.batch([0], ["labels"])["labels"].tolist() == [[5, 6, 4, 7, 8, 4, 1]]
    assert data.columns["input_ids"].limit == 9


def test_tokenizer_directory_without_tokenizer_json(tmp_path):
    pytest.importorskip("transformers")
    directory = tmp_path / "bert"
    directory.mkdir()
    (directory / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog"]))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (tmp_path / "a").write_text("cat dog cat dog")
    data = load(files=str(tmp_path / "a"), tokenizer=str(directory), sequence_length=3, holdout=0)
    assert data.batch([0], ["input_ids"])["input_ids"].tolist() == [[5, 6, 5]]


def test_nothing_is_read_before_it_is_asked_for(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"a" * 100)
    data = load(files=str(path))
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read .*No such file"):
        len(data)


@pytest.mark.parametrize("index", [-1, 24])
def test_indices_outside_are_refused(tmp_path, index):
    (tmp_path / "a").write_bytes(b"a" * 100)
    data = load(files=str(tmp_path / "a"), sequence_length=4, holdout=0)
    with pytest.raises(IndexError, match="of a data set of 24"):
        data.batch([0, index], ["labels"])
    assert data.batch([], ["labels"])["labels"].shape == (0, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": "no/such/*.txt"}, "no file matches 'no/such/*.txt'"),
        ({"files": []}, "got none, expected paths, globs or 'stdlib'"),
        ({"files": "FILE", "tokenizer": "no/such/dir"}, "no directory no/such/dir"),
        ({"files": "FILE", "sequence_length": 0}, "text option 'sequence_length': Expected `integer` >= 1"),
        ({"files": "FILE", "holdout": 1.0}, "text option 'holdout': Expected `number` < 1"),
        ({"files": "FILE", "sequence_lenght": 1}, "did you mean 'sequence_length'"),
        ({}, "missing required field `files`"),
    ],
)
def test_bad_options_say_what_is_wrong(tmp_path, options, message):
    (tmp_path / "a").write_bytes(b"a" * 100)
    if options.get("files") == "FILE":
        options = {**options, "files": str(tmp_path / "a")}
    with pytest.raises(UserError) as caught:
        load(**options)
    assert message in str(caught.value)


def test_too_little_text(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"four")
    with pytest.raises(UserError, match="got 4 tokens from 1 texts, expected at least sequence_length"):
        len(load(files=str(tmp_path / "b"), sequence_length=4, holdout=0))
    with pytest.raises(UserError, match="0 cannot be divided"):
        len(load(files=str(tmp_path / "a")))
    with pytest.raises(UserError, match="no held-out samples because holdout is 0"):
        load("heldout", files=str(tmp_path / "b"), holdout=0)


def test_malformed_tokenizer(tmp_path):
    (tmp_path / "a").write_bytes(b"a" * 100)
    (tmp_path / "tokenizer.json").write_text("not json")
    with pytest.raises(UserError, match="tokenizer: cannot read"):
        load(files=str(tmp_path / "a"), tokenizer=str(tmp_path))


@pytest.mark.parametrize("text", ["the caf\xe9 sat", "\xe9t\xe9 " * 9])
@pytest.mark.parametrize("kind", ["text", "clients"])
def test_text_in_another_encoding_is_refused_for_a_tokenizer(
    text: str, kind: str, tmp_path: Path, tokenizer_dir: Path
) -> None:
    """It would train on replacement characters."""
    (tmp_path / "a").write_bytes(text.encode("latin1"))
    (tmp_path / "b").write_bytes(b"the cat sat " * 9)
    at = text.index("\xe9") + 1
    words = rf"text option 'files': .*a: byte {at}, 0xe9, is no UTF-8, expected text in UTF-8, or tokenizer 'bytes'"
    options = TextOptions(files=str(tmp_path / "[ab]"), tokenizer=str(tokenizer_dir), sequence_length=2, holdout=0)
    with pytest.raises(UserError, match=words):
        TextClients(options) if kind == "clients" else len(load_text(options, "train"))


CODED = {"gzip": gzip.compress(b"the cat sat" * 9), "UTF-16": ("the cat sat" * 9).encode("utf-16")}


@pytest.mark.parametrize("kind", [*CODED, "UTF-16 or UTF-32"])
def test_what_looks_like_no_text_is_named(kind: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    content = CODED.get(kind, ("the cat sat" * 9).encode("utf-16-be"))
    (tmp_path / "a").write_bytes(content)
    with pytest.warns(UserWarning, match=f"a begins as {kind} does, and is taken as it is"):
        data = load(files=str(tmp_path / "a"), sequence_length=3, holdout=0)
        assert text_of(data) == content[: len(data) * 3 + 1]
    if kind in CODED:
        with pytest.raises(UserError, match=rf"is no UTF-8 \(it begins as {kind} does\)"):
            len(load(files=str(tmp_path / "a"), tokenizer=str(tokenizer_dir), sequence_length=3, holdout=0))


@pytest.mark.parametrize("holdout", [0.3, 0.31, 0.32, 0.33])
def test_a_character_that_a_cut_parts_is_left_out(holdout: float, tmp_path: Path, tokenizer_dir: Path) -> None:
    """Of a split by bytes, and of `max_bytes`."""
    (tmp_path / "a").write_text("cat \U0001f408 " * 20)
    for most in (None, 50, 51, 52, 53):
        options: dict[str, object] = {"files": str(tmp_path / "a"), "holdout": holdout, "max_bytes": most}
        for split in ("train", "heldout"):
            whole = load(split, **options, sequence_length=1)
            raw = text_of(whole)
            data = load(split, **options, tokenizer=str(tokenizer_dir), sequence_length=1)
            tokens = data.batch(range(len(data)), ["input_ids", "labels"])
            found = [*tokens["input_ids"].flatten().tolist(), int(tokens["labels"][-1, 0])]
            expected = raw.decode(errors="ignore").split()
            assert found == [5 if word == "cat" else 1 for word in expected]
