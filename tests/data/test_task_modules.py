"""What batches of tasks hold, what is made up, and what is said of examples that cannot be meant."""

import json
from itertools import combinations

import datasets
import pytest
import torch
from lightning.pytorch import Trainer

from lin_attn.data import ClassificationData, RankingData, TranslationData
from lin_attn.data.made_up_languages import LanguagePair
from lin_attn.data.stdlib_examples import package_snippets, package_triples
from models import Seq2Seq
from tests.data.task_files import as_rank, pair_rows, text, translation_rows, triple_rows, write_jsonl


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIN_ATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def read(module, tokens):
    """The texts of a row between its special tokens."""
    names = {index: f"<{name}>" for name, index in module.tokenizer.ids.items()}
    parts = [names[t] if t in names else module.tokenizer.decode([t]).decode() for t in tokens.tolist()]
    return "".join(parts)


# Classification


def test_a_pair_is_one_sequence_with_types_and_its_label(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", pair_rows(30))
    module = ClassificationData(str(source), text_column="a", pair_column="b", eval_batch_size=3)
    [loader] = module.val_dataloader() or module.test_dataloader()
    batch = next(iter(loader))
    for row, mask, types, label in zip(
        batch["tokens"], batch["key_mask"], batch["token_types"], batch["labels"], strict=True
    ):
        written = read(module, row[mask])
        number = int(written.removeprefix("<class>").split()[0])
        assert written == f"<class>{text(number)}<separator>{text(2 * number + 1)}<separator>"
        assert label == number % 2
        assert types[mask].sum() == len(text(2 * number + 1)) + 1
        assert set(row[~mask].tolist()) <= {module.tokenizer.ids["pad"]}


def test_sequences_are_cut_to_max_length(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", pair_rows(30))
    module = ClassificationData(str(source), text_column="a", pair_column="b", max_length=12)
    for batch in module.train_dataloader():
        assert batch["tokens"].shape[1] <= 12
        assert (batch["tokens"] == module.tokenizer.ids["separator"]).sum(1).eq(2).all()


def test_classes_that_are_texts_are_numbered_and_unknown_ones_refused(tmp_path):
    rows = [{"text": text(i), "label": ["yes", "no"][i % 2]} for i in range(20)]
    train = write_jsonl(tmp_path / "a.jsonl", rows)
    module = ClassificationData(str(train), validation_fraction=0.0, test_fraction=0.0)
    assert module.parts["train"][0].rows["label"][:] == [1, 0] * 10
    assert module.class_names == ["no", "yes"]
    odd = write_jsonl(tmp_path / "b.jsonl", [{"text": "x", "label": "maybe"}])
    with pytest.raises(ValueError, match=r"column 'label' of validation .* has the class 'maybe'; wanted those of"):
        ClassificationData(str(train), validation_source=str(odd), test_fraction=0.0).setup()


def test_numbers_are_for_a_regression(tmp_path):
    rows = [{"text": text(i), "label": i / 4} for i in range(20)]
    source = str(write_jsonl(tmp_path / "a.jsonl", rows))
    batch = next(iter(ClassificationData(source, numbers=True).train_dataloader()))
    assert batch["labels"].dtype == torch.float32
    with pytest.raises(ValueError, match=r"holds 0\.25; wanted classes from 0, or numbers=true"):
        ClassificationData(source).setup()


def test_a_test_split_without_labels_is_predicted_and_not_judged(tmp_path):
    train = str(write_jsonl(tmp_path / "a.jsonl", pair_rows(20)))
    for unlabelled in ([{"a": text(i), "label": -1} for i in range(6)], [{"a": text(i)} for i in range(6)]):
        test = str(write_jsonl(tmp_path / "b.jsonl", unlabelled))
        module = ClassificationData(train, text_column="a", test_source=test, eval_batch_size=4)
        assert [len(batch["tokens"]) for batch in module.predict_dataloader()] == [4, 2]
        assert all("labels" not in batch for batch in module.predict_dataloader())
        with pytest.raises(ValueError, match="the test examples 'test' have no labels to judge by"):
            module.test_dataloader()
    missing = str(write_jsonl(tmp_path / "c.jsonl", [*pair_rows(20), {"a": "x", "label": -1}]))
    with pytest.raises(ValueError, match="has no label in row 20"):
        ClassificationData(missing, text_column="a", validation_fraction=0.0, test_fraction=0.0).setup()


def test_snippets_are_of_packages_and_splits_share_no_file():
    tables = package_snippets(2000, 0, 0.2, 0.2)
    files = [set(table["file"]) for table in tables.values()]
    assert all(a.isdisjoint(b) for a, b in combinations(files, 2))
    assert all(set(table["label"]) == set(range(8)) for table in tables.values())
    assert tables == package_snippets(2000, 0, 0.2, 0.2)
    assert tables["train"]["text"] != package_snippets(2000, 1, 0.2, 0.2)["train"]["text"]
    texts = tables["train"]["text"]
    assert len(texts) == len(set(zip(texts, tables["train"]["file"], strict=True)))


# Ranking


def test_the_nearer_pair_comes_first(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", triple_rows(30))
    module = RankingData(str(source), batch_size=7)
    seen = 0
    for batch in module.train_dataloader():
        for first, second in zip(batch["first_tokens"], batch["second_tokens"], strict=True):
            above, below = (read(module, row).split("<separator>")[1] for row in (first, second))
            number = int(above[1:])
            assert (above[0], below) == (("b", f"c{number}") if number % 2 == 0 else ("c", f"b{number}"))
            seen += 1
    assert seen == len(module.parts["train"][0].rows)


def test_another_label_than_b_or_c_is_refused(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [*triple_rows(3), {"A": "a", "B": "b", "C": "c", "label": "A"}])
    with pytest.raises(
        ValueError, match=r"column 'label' of train \(train\) holds 'A' in row 3; wanted \"B\" or \"C\""
    ):
        RankingData(str(source), validation_fraction=0.0, test_fraction=0.0).setup()


def test_triples_have_two_snippets_of_one_package():
    package = {}
    for table in package_snippets(10**6, 0, 0.2, 0.2).values():
        for snippet, label in zip(table["text"], table["label"], strict=True):
            package.setdefault(snippet, set()).add(label)
    tables = package_triples(300, 0, 0.2, 0.2)
    assert [len(table["A"]) for table in tables.values()] == [180, 60, 60]
    for table in tables.values():
        assert {"B", "C"} == set(table["label"])
        for a, b, c, label in zip(*table.values(), strict=True):
            near = package[b] if label == "B" else package[c]
            assert package[a] & near, "the nearer is of the same package"


# Translation


def test_a_target_has_begin_and_end_and_a_source_its_end(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", translation_rows(40))
    module = TranslationData(str(source), batch_tokens=256, max_length=128)
    end = module.tokenizer.end_id
    for batch in module.train_dataloader():
        for side in ("source", "target"):
            mask = batch.get(f"{side}_mask", torch.ones_like(batch[side], dtype=torch.bool))
            for row, real in zip(batch[side], mask, strict=True):
                found = row[real].tolist()
                assert found[-1] == end
                assert (found[0] == end) == (side == "target")
                assert end not in found[1:-1]


def test_long_training_pairs_are_left_out_and_counted_and_of_evaluation_none(tmp_path):
    rows = translation_rows(40)
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    options = {"validation_source": str(source), "test_fraction": 0.0, "batch_tokens": 64}
    module = TranslationData(str(source), max_length=30, **options)
    fits = [row for row in rows if len(row["source"]) + 1 <= 30 and len(row["target"]) + 2 <= 30]
    assert 0 < len(fits) < 40
    with pytest.warns(UserWarning, match=f"leaves out {40 - len(fits)} of 40 training pairs"):
        module.setup()
    assert len(module.parts["train"][0].rows) == len(fits)
    batches = list(module.val_dataloader()[0])
    assert sum(len(batch["source"]) for batch in batches) == 40
    assert max(batch["source"].shape[1] for batch in batches) == 30
    assert max(batch["target"].shape[1] for batch in batches) == max(len(row["target"]) for row in rows) + 2


def test_made_up_pairs_are_a_function_of_the_source_and_no_two_alike():
    pairs = [pair for _, pair in zip(range(20000), LanguagePair(0).pairs(), strict=False)]
    sources, targets = ({pair[side] for pair in pairs} for side in (0, 1))
    assert len(sources) == len(targets) == 20000
    assert pairs[:50] == [pair for _, pair in zip(range(50), LanguagePair(0).pairs(), strict=False)]
    assert pairs[:50] != [pair for _, pair in zip(range(50), LanguagePair(1).pairs(), strict=False)]
    words = [{word for sentence in side for word in sentence.split()} for side in (sources, targets)]
    assert not words[0] & words[1]


def test_made_up_splits_have_no_sentence_in_common():
    module = TranslationData(n_examples=3000, validation_fraction=0.1, test_fraction=0.1)
    parts = [part.rows for found in module.parts.values() for part in found]
    assert sum(map(len, parts)) == 3000
    for side in ("source", "target"):
        sentences = [{tuple(row) for row in rows[side]} for rows in parts]
        assert all(a.isdisjoint(b) for a, b in combinations(sentences, 2))
    with pytest.raises(ValueError, match="config_name is 'de-en', which has no effect with source 'made-up'"):
        TranslationData(config_name="de-en").setup()


def test_one_vocabulary_is_learned_of_both_sides_of_training_and_kept(tmp_path):
    options = {"n_examples": 400, "tokenizer": "bpe", "vocab_size": 400, "validation_fraction": 0.1}
    module = TranslationData(**options)
    assert module.vocab_size == 400
    fingerprint = module.tokenizer.fingerprint
    [file] = (tmp_path / "cache" / "tokenizers").iterdir()
    assert TranslationData(**options).tokenizer.fingerprint == fingerprint
    file.write_text(json.dumps({"name": "bytes"}))
    assert TranslationData(**options).tokenizer.fingerprint == "bytes-1", "the file is what is read"
    file.write_text("{")
    assert TranslationData(**options).tokenizer.fingerprint == fingerprint, "a file that was cut off is made anew"


# All of them


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ClassificationData, {"source": ""}, "source must be a non-empty string, got ''"),
        (ClassificationData, {"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        (ClassificationData, {"max_length": 2}, "max_length must be at least 3"),
        (ClassificationData, {"pair_column": "b", "max_length": 4}, "max_length must be at least 5"),
        (ClassificationData, {"validation_split": []}, "validation_split must be a non-empty string, a list of such"),
        (ClassificationData, {"validation_fraction": 0.5, "test_fraction": 0.5}, "test_fraction must be below"),
        (RankingData, {"text_columns": ["A", "B"]}, "text_columns must be three columns"),
        (TranslationData, {"batch_tokens": 100}, "batch_tokens must be at least max_length = 512, got 100"),
        (TranslationData, {"vocab_size": 300}, "vocab_size is 300 with tokenizer 'bytes'"),
        (TranslationData, {"source": "nowhere.jsonl"}, "cannot read 'nowhere.jsonl'"),
    ],
)
def test_what_cannot_be_meant_is_told(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options).setup()


def test_a_column_that_is_no_text_and_a_text_that_is_missing_are_told(tmp_path):
    numbers = str(write_jsonl(tmp_path / "a.jsonl", [{"text": i, "label": 0} for i in range(9)]))
    with pytest.raises(ValueError, match=r"column 'text' holds Value\('int64'\); wanted text"):
        ClassificationData(numbers).setup()
    missing = str(
        write_jsonl(tmp_path / "b.jsonl", [{"text": None if i == 4 else text(i), "label": 0} for i in range(9)])
    )
    with pytest.raises(ValueError, match="column 'text' has no text in the row"):
        ClassificationData(missing).setup()


def test_without_test_examples_test_says_so_and_fit_has_no_loader(tmp_path):
    source = str(write_jsonl(tmp_path / "a.jsonl", pair_rows(20)))
    options = {"text_column": "a", "validation_fraction": 0.0, "test_fraction": 0.0}
    with pytest.raises(ValueError, match="there are no test examples"):
        as_rank(ClassificationData(source, **options), 0, 1, fn="test").test_dataloader()
    assert as_rank(ClassificationData(source, **options), 0, 1).val_dataloader() == []


def test_a_model_and_its_data_may_have_arguments_of_one_name(tmp_path):
    """Lightning refuses to log two values under one name."""
    network = {"vocab_size": 300, "d_model": 8, "n_layers": 1, "n_heads": 1}
    data = TranslationData(n_examples=60, tokenizer="bpe", vocab_size=300, end_token="<end>", batch_tokens=512)
    trainer = Trainer(
        max_steps=1, logger=True, accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(Seq2Seq(network, {"warmup_steps": 1}, begin_token=0, end_token=0), data)
    assert trainer.global_step == 1
    assert data.hparams["end_token"] == "<end>"
