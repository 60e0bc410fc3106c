"""Small sets with the columns and splits of those that the configurations of tasks name, and small tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from tests.data.look_alikes import write_split
from tests.data.task_files import text, triple_rows, write_jsonl

Options = dict[str, Any]

# task → the columns of its texts
GLUE = {
    "mrpc": ("sentence1", "sentence2"),
    "sst2": ("sentence",),
    "qnli": ("question", "sentence"),
    "stsb": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "mnli": ("premise", "hypothesis"),
}


def glue(root: Path) -> Path:
    """nyu-mll/glue: configurations in the card; test has no labels."""
    card = ["---", "configs:"]
    for task, columns in GLUE.items():
        card.append(f"- config_name: {task}\n  data_files:")
        judged = ("matched", "mismatched") if task == "mnli" else ("",)
        splits = [
            ("train", 12),
            *((f"{role}_{name}".strip("_"), 5) for role in ("validation", "test") for name in judged),
        ]
        for split, n in splits:
            rows = {column: [text(i + 40 * place) for i in range(n)] for place, column in enumerate(columns)}
            classes = 3 if task == "mnli" else 2
            labels = [i / 4 for i in range(n)] if task == "stsb" else [i % classes for i in range(n)]
            if split.startswith("test"):
                labels = [-1.0 if task == "stsb" else -1] * n
            write_split(root / task, split, {**rows, "label": labels, "idx": list(range(n))})
            card.append(f"  - split: {split}\n    path: {task}/{split}-*")
    (root / "README.md").write_text("\n".join([*card, "---", ""]))
    return root


def wmt14(root: Path) -> Path:
    """wmt/wmt14: a folder a pair of languages, rows of one column with a field a language."""
    card = ["---", "configs:", "- config_name: de-en\n  data_files:"]
    for split, n in (("train", 40), ("validation", 6), ("test", 6)):
        pairs = [{"de": text(i).upper(), "en": text(i)} for i in range(n)]
        write_split(root / "de-en", split, {"translation": pairs})
        card.append(f"  - split: {split}\n    path: de-en/{split}-*")
    (root / "README.md").write_text("\n".join([*card, "---", ""]))
    return root


def cail(root: Path) -> Path:
    """CAIL2019-SCM: files of JSON lines."""
    for number, name in enumerate(("train", "valid", "test")):
        write_jsonl(root / f"{name}.json", triple_rows(60)[number * 20 : number * 20 + 20])
    return root


def word_piece(root: Path) -> Path:
    """A folder with a tokenizer of BERT's kind."""
    root.mkdir(parents=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = {token: i for i, token in enumerate([*special, *letters, *(f"##{letter}" for letter in letters)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]"}))
    return root


SMALL = {"data.eval_batch_size": 2, "data.num_workers": 0}
ROWS = SMALL | {"data.batch_size": 2}
PAIRS = SMALL | {"data.batch_tokens": 256}


def glue_rows(folder: Path) -> Options:
    return ROWS | {"data.source": f"hub:{glue(folder / 'glue')}", "data.tokenizer": word_piece(folder / "tokenizer")}


def cail_rows(folder: Path) -> Options:
    return ROWS | {"data.source": cail(folder)}


def wmt14_pairs(folder: Path) -> Options:
    return PAIRS | {"data.source": f"hub:{wmt14(folder)}", "model.network.d_ff": 32}


# configuration → what writes data like its own into a folder, and gives the options that name them
LOOK_ALIKES: dict[str, Callable[[Path], Options]] = {
    **{f"glue-{task}": glue_rows for task in GLUE},
    **{f"cail2019-scm-{length}": cail_rows for length in (512, 1024)},
    **{f"wmt14-en-de-{position}": wmt14_pairs for position in ("rope", "sinusoidal")},
    **{
        f"small-translation-{attention}-{position}": lambda _: PAIRS | {"data.n_examples": 400}
        for attention in ("softmax", "linear")
        for position in ("rope", "sinusoidal")
    },
    **{
        f"small-{task}-{attention}-rope": lambda _: ROWS | {"data.n_examples": 400}
        for task in ("classification", "ranking")
        for attention in ("softmax", "linear")
    },
}
