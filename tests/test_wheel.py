"""The wheel, installed elsewhere, has all that it needs: packages, types, configurations, the command."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_wheel_trains_and_generates_in_an_environment_of_its_own(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"lin_attn/py.typed", "models/py.typed", "models/configs/lm/debug.yaml"} <= set(names)
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
