"""What is public is what `__all__` says, sorted, and importing the package is cheap."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import dcpfs

ROOT = Path(dcpfs.__file__).parent
MODULES = sorted(
    ".".join(("dcpfs", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
)


def order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: as ruff sorts them."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_true(name: str) -> None:
    module = import_module(name)
    path = Path(str(module.__file__))
    if not hasattr(module, "__all__"):
        defined = [
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        ]
        assert not defined, f"{name} defines {defined} and has no __all__"
        return
    exported = list(module.__all__)
    assert exported == sorted(exported, key=order)
    assert len(exported) == len(set(exported))
    for entry in exported:
        assert hasattr(module, entry), f"{name}.__all__ names {entry}, which isn't there"


def test_every_public_name_of_the_package_resolves_and_has_a_docstring() -> None:
    for name in dcpfs.__all__:
        value = getattr(dcpfs, name)
        if name != "__version__":
            assert value.__doc__, f"{name} has no docstring"
    assert set(dcpfs.__all__) <= set(dir(dcpfs))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dcpfs.nothing


def test_the_lazy_table_and_the_type_checkers_view_agree() -> None:
    source = (ROOT / "__init__.py").read_text()
    declared = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dcpfs.")
        for alias in node.names
    }
    assert declared | {"__version__"} == set(dcpfs.__all__)


def test_importing_the_package_loads_neither_torch_nor_a_storage_client() -> None:
    code = "import json, sys; import dcpfs; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(answer.stdout)
    heavy = {"torch", "s3fs", "aiobotocore", "botocore", "fsspec", "pydantic", "numpy", "rich", "typer"}
    assert not heavy & {name.split(".")[0] for name in loaded}
