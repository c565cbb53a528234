"""Every case of this layer has a test that names it: ``test_case_31_…``, or ``cases_63_64`` for several."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
WANTED = {
    *(1, 2, 3, 5, 6, 7, 8, 10, 11, 13, 14, 16, 19, 20, 22, 25, 27, 28, 30, 31, 32, 33, 34, 35, 37, 38, 39, 40, 41, 42),
    *(44, 45, 46, 48, 49, 50, 60, 62, 63, 64, 65, 66, 69, 70, 71, 72, 73, 74, 76, 77, 78, 80, 81, 82, 83, 84, 85, 86),
    *(12, 15, 17, 51, 52, 53, 54, 55, 56, 58, 59, 68),
    *(88, 89, 90, 91, 93, 95, 99, 100, 101, 102, 103, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114),
}


def cases_named_by(name: str) -> set[int]:
    found = re.search(r"cases?((?:_\d+)+)(?:_|$)", name)
    return {int(number) for number in re.findall(r"\d+", found.group(1))} if found else set()


def test_every_case_of_this_layer_has_a_test_named_after_it() -> None:
    named: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                named |= cases_named_by(node.name)
    assert not WANTED - named, f"cases without a test: {sorted(WANTED - named)}"


def test_case_numbers_are_read_from_names() -> None:
    assert cases_named_by("test_case_31_nothing_is_left") == {31}
    assert cases_named_by("test_cases_63_64_memory") == {63, 64}
    assert cases_named_by("test_other_31") == set()
