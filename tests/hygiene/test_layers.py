"""Imports go down only: the layers of the design, proved over every import statement, lazy ones included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcpfs

ROOT = Path(dcpfs.__file__).parent
# From the bottom up. A module may import its own layer and those before it.
LAYERS = (
    ("_version",),
    ("errors",),
    ("config", "ranks", "torch_private"),
    ("worker_deaths",),
    ("storage",),
    ("format",),
    ("dcp",),
    ("background",),
    ("checkpointer",),
    ("testing", "integrations"),
    ("cli",),
    ("__init__", "__main__"),
)
RANK_OF = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MODULES = sorted(ROOT.rglob("*.py"))


def layer_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            if module == "dcpfs":
                yield from ((node.lineno, f"dcpfs.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def test_every_module_has_a_layer() -> None:
    assert {layer_of(path) for path in MODULES} <= set(RANK_OF)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_downwards_only(path: Path) -> None:
    own = layer_of(path)
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "dcpfs":
            continue
        if len(parts) == 1 or parts[1] not in RANK_OF:  # the package itself, or a public name of it
            assert own in {"cli", "testing", "integrations"}, f"line {line}: {name}: an inner layer imports the package"
            continue
        assert RANK_OF[parts[1]] <= RANK_OF[own], f"line {line}: {own} imports {name}, which lies above it"


@pytest.mark.parametrize("layer", ["storage", "errors", "config"])
def test_the_storage_layer_does_not_know_torch(layer: str) -> None:
    for path in MODULES:
        if layer_of(path) == layer:
            used = {name.split(".")[0] for _, name in imports_of(path)}
            assert "torch" not in used, f"{path} imports torch"


def test_private_names_of_torch_live_in_one_module() -> None:
    allowed = {
        ROOT / "torch_private.py",
        ROOT / "cli" / "demo" / "torch_reader.py",  # runs where dcpfs can't be imported
    }
    for path in MODULES:
        if path in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                private = [part for part in (node.module or "").split(".") if part.startswith("_")]
                private += [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path}:{node.lineno} imports {private} of torch"


def test_the_package_asserts_nothing() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}: assert is for tests"


def test_nothing_calls_os_sync_or_defines_del() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "os.sync", f"{path}:{node.lineno}"
            if isinstance(node, ast.FunctionDef):
                assert node.name != "__del__", f"{path}:{node.lineno}: no work in __del__"
