"""What a background process imports is what its parent would, whatever lies in the current directory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dcpfs.background.process import start_command


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_a_module_in_the_current_directory_does_not_stand_in_for_pythons(safe_path: str, tmp_path: Path) -> None:
    library, here = tmp_path / "library", tmp_path / "here"
    library.mkdir()
    here.mkdir()
    (here / "random.py").write_text("raise SystemExit('the wrong module')\n")
    (library / "begin.py").write_text(
        "import random\n\ndef main(arguments):\n    print(arguments, random.__name__)\n    return 7\n"
    )
    # Without the second variable every Python does what those before 3.11 do with it.
    environment = {**os.environ, "PYTHONPATH": str(library), "PYTHONSAFEPATH": safe_path}
    command = [*start_command("begin"), "3", "four"]
    ended = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (7, "['3', 'four'] random\n"), ended.stderr
