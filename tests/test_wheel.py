"""The wheel, installed elsewhere, has all that it needs: packages, types, configurations, checkpoints, the command."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from lin_attn.data.tokenizer import ByteTokenizer
from models import CausalLM, available

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_wheel_trains_and_generates_in_an_environment_of_its_own(tmp_path):
    # A copy, with one checkpoint more than those that are shipped.
    source = tmp_path / "source"
    for part in ("lin_attn", "models", "configs"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source)
    model = CausalLM(network={"d_model": 16, "n_layers": 1, "n_heads": 2})
    model.tokenizer = ByteTokenizer()
    model.save_pretrained(source / "models" / "zoo" / "tiny")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"lin_attn/py.typed", "models/py.typed", "models/configs/lm/debug.yaml"} <= set(names)
    files = [path for path in (source / "models" / "zoo").rglob("*") if path.is_file()]
    assert {path.relative_to(source).as_posix() for path in files} <= set(names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"lin_attn", "models"}

    # The dependencies are those of this environment, by path; its own copy of the project is not on that path.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    [site] = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"LIN_ATTN_CACHE": "cache"})
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(python), "-c", "import lin_attn, models.cli; print(lin_attn.__file__, models.cli.__file__)")
    assert all(path.startswith(str(environment)) for path in where.split())
    command = str(environment / "bin" / "lin-attn")
    assert str(environment) in run(command, "--help")
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 400)
    run(command, "fit", "-c", "configs/lm/debug.yaml", "--data.source", "text.txt", "--trainer.max_steps", "4",
        "--trainer.val_check_interval", "4")  # fmt: skip
    checkpoint = "runs/debug/version_0/checkpoints/last.ckpt"
    text = run(command, "generate", "--checkpoint", checkpoint, "--prompt", "All", "--max-new-tokens", "5")
    assert text.startswith("All")
    load = "from models import available, from_pretrained; print([n for n in available() if from_pretrained(n)])"
    assert run(str(python), "-c", load).strip() == str(sorted({*available(), "tiny"}))
    assert run(command, "generate", "--model", "tiny", "--prompt", "No", "--max-new-tokens", "5").startswith("No")
