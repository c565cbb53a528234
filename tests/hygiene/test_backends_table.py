"""The README's table of backends is what the stores declare."""

from __future__ import annotations

from pathlib import Path

from dcpfs.testing.backends import table


def test_the_table_in_the_readme_is_the_generated_one() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert table() in readme, "run python -m dcpfs.testing.backends and put its output into README.md"
