"""Rows come whole from every kind of file and from sets of the hub, and splits share no text."""

from itertools import combinations

import datasets
import pytest

from lin_attn.data.rows import RowSource, cut, read_files
from tests.data.look_alikes import write_split
from tests.data.task_files import pair_rows, text, write_jsonl


def test_a_csv_keeps_na_and_empty_fields_as_text(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\nNA,0\n"one, two",1\nnull,0\n"",1\n')
    assert read_files(str(tmp_path / "a.csv"))[:] == {"text": ["NA", "one, two", "null", ""], "label": [0, 1, 0, 1]}


def test_a_tsv_has_quotes_as_they_are(tmp_path):
    (tmp_path / "a.tsv").write_text('text\tlabel\nsay "so\t0\n"yes" she\t1\n')
    assert read_files(str(tmp_path / "a.tsv"))["text"][:] == ['say "so', '"yes" she']


def test_files_of_a_glob_are_one_table_in_the_order_of_their_names(tmp_path):
    rows = pair_rows(9)
    for name, part in (("c", rows[6:]), ("a", rows[:2]), ("b", rows[2:6])):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    for source in (tmp_path, tmp_path / "*.jsonl"):
        assert read_files(str(source)).to_list() == rows


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "found nothing"),
        ({"a.txt": "x"}, r"end in \.txt; wanted one of \.jsonl"),
        ({"a.jsonl": "{}", "b.csv": "a"}, r"end in \.csv, \.jsonl"),
        ({"a.jsonl": ""}, r"a\.jsonl' is empty"),
        ({"a.jsonl": '{"text": '}, "cannot read the rows of"),
    ],
)
def test_what_is_no_table_is_refused_by_name(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_files(str(tmp_path))


def test_splits_lose_and_double_nothing_and_share_no_text():
    rows = datasets.Dataset.from_dict({"text": [text(i // 3) for i in range(600)], "n": list(range(600))})
    parts = cut(rows, ["text"], 0.2, 0.2)
    assert sorted(n for part in parts.values() for n in part["n"]) == list(range(600))
    texts = [set(part["text"]) for part in parts.values()]
    assert all(a.isdisjoint(b) for a, b in combinations(texts, 2))
    assert 60 < len(parts["validation"]) < 180
    more = datasets.Dataset.from_dict({"text": [text(i) for i in range(400)], "n": list(range(400))})
    assert texts[1] <= set(cut(more, ["text"], 0.2, 0.2)["validation"]["text"]), "more rows move no other"
    with pytest.raises(ValueError, match="there are 1 different texts to cut 3 splits from"):
        cut(rows.select([0, 1, 2]), ["text"], 0.2, 0.2)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A set with two validation splits and fields within a column."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for split, n in (("train", 30), ("validation_matched", 4), ("validation_mismatched", 5)):
        pairs = [{"de": text(i).upper(), "en": f"{split} {text(i)}"} for i in range(n)]
        write_split(tmp_path / "set" / "data", split, {"translation": pairs})
    return f"hub:{tmp_path / 'set'}"


COLUMNS = ("translation.en", "translation.de")


def test_splits_of_the_hub_are_parts_by_name(hub):
    parts = RowSource(hub, COLUMNS, validation_split=("validation_matched", "validation_mismatched")).open()
    assert [(part.name, len(part.rows)) for part in parts["validation"]] == [("matched", 4), ("mismatched", 5)]
    assert parts["validation"][1].rows["translation.en"][0] == f"validation_mismatched {text(0)}"
    # The default test split is not there: it is cut from train.
    assert len(parts["train"][0].rows) + len(parts["test"][0].rows) == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_split": ("validation_matched", "dev")}, "has no split 'dev'"),
        ({"train_split": "training"}, "has no split 'training'"),
        ({"columns": ("translation.en", "translation.fr")}, "has no column 'translation.fr', there are"),
        ({"n_examples": 5}, "n_examples is 5 with source 'hub:"),
    ],
)
def test_what_the_hub_set_lacks_is_named(hub, options, message):
    with pytest.raises(ValueError, match=message):
        RowSource(**{"source": hub, "columns": COLUMNS, **options}).open()


@pytest.mark.parametrize("option", [{"config_name": "mrpc"}, {"validation_split": ("dev",)}, {"revision": "main"}])
def test_options_of_the_hub_are_refused_with_files(tmp_path, option):
    source = str(write_jsonl(tmp_path / "a.jsonl", pair_rows(9)))
    with pytest.raises(ValueError, match=rf"{next(iter(option))} is .* has no effect"):
        RowSource(source, ("a", "b"), **option).open()


def test_a_file_for_validation_is_taken_whole(tmp_path):
    files = [write_jsonl(tmp_path / name, pair_rows(n)) for name, n in (("a.jsonl", 20), ("b.jsonl", 7))]
    parts = RowSource(str(files[0]), ("a",), validation_source=str(files[1]), test_fraction=0.0).open()
    assert [len(found[0].rows) if found else 0 for found in parts.values()] == [20, 7, 0]
