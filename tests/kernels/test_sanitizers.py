"""Random problems under the compiler's sanitizers: no byte is touched out of bounds, none by two threads at once.

`make sanitize` runs this file alone.
"""

import os
import subprocess
from pathlib import Path

import pytest

from lin_attn.kernels.cpu import build

DRIVER = Path(__file__).with_name("driver.cpp")
FLAGS = ["-std=c++17", "-O1", "-g1", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-Wno-psabi"]
# The checks left out would make the compiler take four times as long.
MEMORY = ["-fsanitize=address,undefined", "-fno-sanitize=null,alignment,pointer-overflow", "-fno-sanitize-recover=all"]
RUNS = {
    # compiler's flags, seed, number of problems
    "memory, vectors of this machine": ([*MEMORY, *build.target_flags()[0]], 0, 80),
    "memory, vectors of 16 floats": ([*MEMORY, "-DLIN_ATTN_LANES=16"], 1, 80),
    "threads": (["-fsanitize=thread", *build.target_flags()[0]], 2, 40),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_random_problems_pass_under_a_sanitizer(run, tmp_path):
    flags, seed, problems = RUNS[run]
    compiler, _ = build.find_compiler()
    (tmp_path / "empty.cpp").write_text("int main() {}\n")
    sanitizers = [flag for flag in flags if "sanitize" in flag]
    tried = subprocess.run(
        [compiler, *sanitizers, str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty")], capture_output=True
    )
    if tried.returncode or subprocess.run([str(tmp_path / "empty")], capture_output=True).returncode:
        pytest.skip(f"{compiler} has no {sanitizers[0]} here")
    program = tmp_path / "driver"
    command = [compiler, *FLAGS, *flags, f"-I{build.SOURCES}", str(DRIVER), "-o", str(program)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    said = subprocess.run([str(program), str(seed), str(problems)], capture_output=True, text=True, env=environment)
    print(said.stdout)  # noqa: T201, shown by pytest -s, as `make sanitize` calls it
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-6000:]
    assert f"{problems} problems" in said.stdout
