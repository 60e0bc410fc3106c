"""Each command and snippet of the README runs, in its order, in one folder; trainings are cut short."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from models.cli import main

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
SHORT = ["--trainer.max_steps", "100", "--model.network.d_model", "16", "--model.network.n_layers", "1",
         "--data.block_length", "32", "--data.batch_size", "4", "--trainer.enable_progress_bar", "false"]  # fmt: skip
# The environment of the tests is taken as made: -o tells make not to make it anew.
MAKE = ["make", "-C", str(ROOT), f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.run", "-o", f"{sys.prefix}/.dev"]


def run_command(line: str, folder: Path) -> None:
    command, *arguments = shlex.split(line)
    if command == "lin-attn":
        if arguments[0] == "fit" and "-c" in arguments:
            arguments += SHORT
        if arguments[0] == "scale":
            arguments.append("--dry-run")  # tests/scaling measures
        try:
            status = main(arguments)
        except SystemExit as end:  # help ends the process
            status = end.code
        assert status == 0, line
    elif line == "make train":
        short = shlex.join([*SHORT, "--trainer.default_root_dir", str(folder / "make")])
        subprocess.run([*MAKE, "train", f"ARGS={short}"], check=True)
    elif line == "make test":
        subprocess.run([*MAKE, "test", "ARGS=--collect-only -q -p no:cacheprovider"], check=True)
    else:
        assert line == "pip install .", f"{line} is not run by any test"  # tests/test_wheel.py installs it


@pytest.mark.slow
def test_every_command_and_snippet_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIN_ATTN_CACHE", str(tmp_path / "cache"))
    for name in ("books", "novels"):
        folder = tmp_path / "path" / "to" / name
        folder.mkdir(parents=True)
        for i in range(20):
            (folder / f"{i}.txt").write_text(f"Book {i}: to be, or not to be. " * 100)
    assert len(BLOCKS) >= 7
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "README.md", "exec"), {})
            continue
        for line in text.splitlines():
            run_command(line, tmp_path)
    assert "To be" in capsys.readouterr().out


def test_every_file_that_the_documents_point_to_is_there():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
            assert "://" in target or (document.parent / target).exists(), f"{document.name} → {target}"
