"""Every configuration of configs/roformer says how to run it, and trains two steps at a tiny size on a look-alike.

LOOK_ALIKES has an entry for each: what writes data like its own into a folder and gives the options that name them.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from lin_attn.data.masked import SPECIAL
from models.checkpoint import load_checkpoint, read_checkpoint
from models.cli import main
from models.cli.configs import config_folder
from models.training import TrainedModel
from tests.data.look_alikes import bookcorpus, enwik8, story, wikipedia
from tests.data.task_look_alikes import LOOK_ALIKES as OF_TASKS

FOLDER = config_folder() / "roformer"
TINY = {
    "trainer.max_steps": 2,
    "trainer.val_check_interval": 2,
    "trainer.accumulate_grad_batches": 1,
    "trainer.limit_val_batches": 1,
    "trainer.enable_progress_bar": "false",
    "model.network.d_model": 16,
    "model.network.n_layers": 1,
    "model.network.n_heads": 2,
    "data.batch_size": 2,
}
BLOCKS = {"data.block_length": 16, "data.num_workers": 0}
Options = dict[str, Any]


def stdlib(folder: Path) -> Options:
    (folder / "text").mkdir(parents=True)
    for i in range(20):
        (folder / "text" / f"{i}.py").write_text(story(i))
    return BLOCKS | {"data.source": folder / "text"}


def books_and_wikipedia(folder: Path) -> Options:
    """Both sets, and a WordPiece tokenizer with BERT's special tokens."""
    sets = [{"path": f"hub:{bookcorpus(folder / 'books')}"}]
    sets += [{"path": f"hub:{wikipedia(folder / 'wikipedia', 'en')}", "config_name": "20231101.en"}]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,é"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(words[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    return BLOCKS | {"data.source": json.dumps(sets), "data.tokenizer": folder / "tokenizer.json"}


def whole_enwik8(folder: Path) -> Options:
    return BLOCKS | {"data.source": f"hub:{enwik8(folder)}"}


def chinese(folder: Path) -> Options:
    """Text that is cut into words already, which needs no jieba."""
    root = wikipedia(folder, "zh", lambda i: f"今天 天气 非常 好 。 第 {i} 天 " * 12)
    small = {"data.vocab_size": 396, "model.network.vocab_size": 400}
    return BLOCKS | small | {"data.source": f"hub:{root}", "data.tokenizer": "words", "data.validation_fraction": 0.2}


LOOK_ALIKES: dict[str, Callable[[Path], Options]] = {
    "mlm-bookcorpus-wikipedia-bert": books_and_wikipedia,
    "mlm-bookcorpus-wikipedia-roformer": books_and_wikipedia,
    "enwik8-performer": whole_enwik8,
    "enwik8-performer-rope": whole_enwik8,
    **{f"chinese-stage{i}": chinese for i in range(1, 7)},
    **{
        f"small-mlm-{attention}-{position}": stdlib
        for attention in ("softmax", "linear")
        for position in ("rope", "sinusoidal", "none")
    },
}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to run in, a `datasets` cache of the test's own, and no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def fit(name: str, options: Options) -> int:
    """Trains a configuration in the folder at hand, whose corpus cache is its own; kernels are built once for all."""
    chosen = TINY | {"data.cache_dir": "cache"} | options
    arguments = [part for option, value in chosen.items() for part in (f"--{option}", str(value))]
    return main(["fit", "-c", f"roformer/{name}.yaml", *arguments])


def test_every_configuration_has_a_look_alike() -> None:
    """Here, or in test_task_configs.py, which has the tasks of examples."""
    assert not set(LOOK_ALIKES) & set(OF_TASKS)
    assert set(LOOK_ALIKES) | set(OF_TASKS) == {path.stem for path in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_its_head_names_the_command_the_data_the_figure_and_the_machine(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    head = re.match(r"(#.*\n)+", text)[0]
    assert head.startswith(f"# lin-attn fit -c configs/roformer/{name}.yaml")
    for word in ("Data: ", "Expected: |Expected on|Reaches ", "Needs "):
        assert re.search(word, head), word
    assert yaml.safe_load(text)["trainer"]["default_root_dir"] == f"runs/{name}"


@pytest.mark.parametrize("name", [name for name in LOOK_ALIKES if not name.startswith("chinese-")])
def test_it_trains_two_steps_on_a_look_alike(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(name, LOOK_ALIKES[name](Path("set").absolute())) == 0, capsys.readouterr().err
    assert re.search(r"validation [\w ]+: \d", capsys.readouterr().out)
    saved = Path("runs", name, "version_0", "checkpoints", "last.ckpt")
    assert load_checkpoint(saved, kind=TrainedModel).tokenizer is not None
    assert read_checkpoint(saved)["global_step"] == 2


def test_each_chinese_stage_begins_with_the_weights_of_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    options = chinese(Path("set").absolute())
    for stage in range(1, 7):
        assert fit(f"chinese-stage{stage}", options) == 0
        if stage > 1:
            before = f"runs/chinese-stage{stage - 1}/version_0/checkpoints/last.ckpt"
            assert f"begins with the weights of {before}" in caplog.messages
        assert read_checkpoint(f"runs/chinese-stage{stage}/version_0/checkpoints/last.ckpt")["global_step"] == 2


def test_the_stages_are_those_of_the_papers_table() -> None:
    wanted = [(512, 256, 200_000), (1536, 256, 12_500), (256, 256, 120_000), (128, 512, 80_000), (1536, 256, 10_000),
              (512, 512, 30_000)]  # fmt: skip
    for stage, row in enumerate(wanted, 1):
        config = yaml.safe_load((FOLDER / f"chinese-stage{stage}.yaml").read_text())
        data, trainer = config["data"]["init_args"], config["trainer"]
        batch = data["batch_size"] * trainer["accumulate_grad_batches"]
        assert (data["block_length"], batch, trainer["max_steps"]) == row
        assert trainer["val_check_interval"] % trainer["accumulate_grad_batches"] == 0
        assert config["model"]["init_args"]["network"]["vocab_size"] == data["vocab_size"] + len(SPECIAL)


def test_without_the_stage_before_it_is_said_which_file_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("chinese-stage2", chinese(Path("set").absolute())) == 2
    assert "there is no checkpoint runs/chinese-stage1/version_0/checkpoints/last.ckpt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("twins", "different"),
    [
        ("small-mlm-*", "attention|feature_map|position|rope|default_root_dir"),
        ("mlm-bookcorpus-*", "position|max_length|default_root_dir"),
        ("enwik8-*", "position|max_length|rope|default_root_dir"),
    ],
)
def test_twins_differ_in_attention_and_position_only(twins: str, different: str) -> None:
    texts = [path.read_text() for path in FOLDER.glob(f"{twins}.yaml")]
    bare = {re.sub(rf"^(#.*| *({different}):.*)\n", "", text, flags=re.M) for text in texts}
    assert len(texts) > 1
    assert len(bare) == 1
