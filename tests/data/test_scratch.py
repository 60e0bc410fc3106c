"""What a killed build leaves is removed by the next one; what a living one holds is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from lin_attn.data.scratch import PREFIX, scratch_folder

BUILD = """
import sys, time
from lin_attn.data.scratch import scratch_folder
with scratch_folder(sys.argv[1]) as folder:
    open(folder + "/half", "w").close()
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_folder_of_a_killed_build_is_swept_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    builds = [
        subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        folders = [Path(build.stdout.readline().strip()) for build in builds if build.stdout]
        (tmp_path / "corpus").mkdir()
        (tmp_path / f"{PREFIX}file").write_text("not a folder")
        builds[0].send_signal(signal.SIGKILL)
        builds[0].wait()
        assert [folder.is_dir() for folder in folders] == [True, True]
        with scratch_folder(str(tmp_path)) as mine:
            assert [folder.is_dir() for folder in folders] == [False, True]
            assert os.path.isdir(mine)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {folders[1].name, "corpus", f"{PREFIX}file"}
    finally:
        for build in builds:
            build.kill()
            build.communicate()
