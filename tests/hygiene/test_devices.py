"""Which device a tensor of dcpfs's own lies on does not depend on the default that a training script has set."""

from __future__ import annotations

import ast
from pathlib import Path

import dcpfs

_MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
"""Functions of torch that ask the default device when none is named."""


def _makes_by_default(tree: ast.AST) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in _MAKERS
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


def test_each_tensor_that_is_made_names_its_device() -> None:
    sources = [each for each in Path(dcpfs.__file__).parent.rglob("*.py") if "demo" not in each.parts]
    lines = {
        f"{source.name}:{line}"
        for source in sources
        for line in _makes_by_default(ast.parse(source.read_text("utf-8")))
    }
    assert len(sources) > 100
    assert lines == set()


def test_a_maker_without_a_device_is_found() -> None:
    assert _makes_by_default(ast.parse("import torch\ntorch.empty(3, dtype=torch.uint8)\n")) == [2]
    assert _makes_by_default(ast.parse("import torch\ntorch.empty(3, device='cpu')\n")) == []
