"""Digests by which ranks compare plain values: equal for equal values, whatever their pickles look like."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dcpfs.config import Trust
from dcpfs.dcp.value_digest import digest_value
from dcpfs.format.entries import encode_object


def encode(value: object) -> bytes:
    return encode_object(value, key="key", trust=Trust.ALLOWLIST)


def digest(value: object) -> int:
    return digest_value(value, encode(value), encode)


SALTED = """
from tests.unit.dcp.test_value_digest import digest
names = [f"shard-{n}" for n in range(20)]
print(digest(set(names)), digest((frozenset(names), [1, {"a": {"x", "y", "z"}}])))
"""


def test_sets_have_one_digest_in_all_processes() -> None:
    seen = {
        subprocess.run(
            [sys.executable, "-c", SALTED],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_one_object_twice_and_two_equal_ones_are_the_same() -> None:
    parts = ["ab", "c"]
    text, other = "".join(parts), "".join(parts)
    assert text is not other
    assert digest([text, text]) == digest([text, other])
    assert digest((text, [text, torch.ones(2)])) == digest((other, [text, torch.ones(2)]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1], [True]),
        ([0.0], [-0.0]),
        ([1], (1,)),
        ({1}, frozenset({1})),
        (["a", "b"], ["b", "a"]),
        (["a,b"], ["a", "b"]),
        ([1, {"a"}], [1, {"b"}]),
        (("x", torch.ones(1)), ("x", torch.zeros(1))),
        ([[1, "1"]], [["1", 1]]),
        ([b"a"], ["a"]),
        ([1.0], [1]),
    ],
)
def test_values_that_differ_have_other_digests(one: object, other: object) -> None:
    assert digest(one) != digest(other)
    assert digest((one, torch.ones(1))) != digest((other, torch.ones(1)))


def test_what_is_no_container_and_what_holds_itself_goes_by_its_pickle() -> None:
    data = encode(3)
    assert digest_value(3, data, encode) == digest_value(object(), data, encode)
    endless: list[object] = []
    endless.append(endless)
    assert digest_value(endless, b"x", encode) == digest_value(object(), b"x", encode)
