"""The README's examples run, in the order in which they stand, as a newcomer would type them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

README = Path(__file__).parents[2] / "README.md"


def test_the_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MemoryFileSystem, "store", {})  # as in a process of its own
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README example {number}", "exec"), names)


def test_the_two_commands_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for command in ("demo", "test", "lint", "typecheck", "bench"):
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE), command
