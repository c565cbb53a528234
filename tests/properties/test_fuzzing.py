"""Hostile bytes in place of everything that is read from a store: a typed error or the right value, and nothing else.

Each target runs in a process of its own with little memory to spare, which a crash, a hang or a kill would end. The
normal suite tries the same inputs each time; ``DCPFS_FUZZ_SEED`` and ``DCPFS_FUZZ_SECONDS`` choose those of the nightly
run. ``python -m tests.properties.fuzz_child TARGET SEED 1 60 FOLDER`` tries one input again.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcpfs.errors import CorruptCheckpointError
from tests.properties.fuzz_child import judge, set_high_water_back
from tests.properties.fuzz_targets import TARGETS, Input, Target, equal

SECONDS = float(os.environ.get("DCPFS_FUZZ_SECONDS", "170"))
SEED = int(os.environ.get("DCPFS_FUZZ_SEED", "0")) or time.time_ns() // 1_000_000
COUNTS = {"entries": 1500, "rank files": 1500, "metadata": 700, "manifests": 2000, "steps": 300, "tensors": 600}


def fuzz(target: str, seed: int, count: int, seconds: float, folder: Path) -> dict[str, Any]:
    """What the process says; a process that ended otherwise fails the test with the number of its input."""
    command = [
        sys.executable,
        "-m",
        "tests.properties.fuzz_child",
        target,
        str(seed),
        str(count),
        str(seconds),
        str(folder),
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=seconds + 240, check=False
    )
    at = (folder / "at").read_text().strip() if (folder / "at").exists() else "none"
    assert done.returncode == 0, f"{target}: input {at} ended the process ({done.returncode}): {done.stderr[-3000:]}"
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({target: told}))
    assert not told["faults"], "\n".join(map(str, told["faults"]))
    return told


@pytest.mark.parametrize("target", TARGETS)
def test_case_110_hostile_bytes_are_an_error_or_the_right_value(target: str, tmp_path: Path) -> None:
    told = fuzz(target, 0, COUNTS[target], 600, tmp_path)
    assert told["tried"] == COUNTS[target]
    outcomes = " ".join(told["outcomes"])
    assert "right value" in outcomes or "step 2" in outcomes, "nothing came through: the inputs are too strange"
    assert "Error" in outcomes or "step 1" in outcomes, "nothing was refused: the inputs are too tame"


class _Greedy(Target):
    """Takes 300 MB for each input, in blocks, and gives them back: to the system, or to the heap."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        super().__init__(folder)
        self._block_bytes = block_bytes
        self._tops: list[torch.Tensor] = []

    def read(self, made: Input) -> object:
        torch.ones(30_000_000, dtype=torch.uint8)  # from here on, glibc takes smaller blocks from the heap
        blocks = [torch.ones(self._block_bytes, dtype=torch.uint8) for _ in range(300_000_000 // self._block_bytes)]
        self._tops.append(torch.ones(200_000, dtype=torch.uint8))  # the top of the heap goes back by itself
        blocks.clear()
        raise CorruptCheckpointError("it is damaged")


@pytest.mark.parametrize("block_bytes", [300_000_000, 1_000_000])
def test_the_memory_of_an_input_is_seen_after_one_that_took_as_much(tmp_path: Path, block_bytes: int) -> None:
    if not set_high_water_back():
        pytest.skip("this system does not set the high-water mark of a process's memory back")
    greedy = _Greedy(tmp_path, block_bytes)
    for _ in range(3):
        _, faults = judge(greedy, Input("made up", b"x"))
        others = [fault for fault in faults if not re.fullmatch(r"took [\d.]+ s", fault)]  # on a busy machine
        assert len(others) == 1, faults
        assert re.match(r"took \d+ bytes for ", others[0]), faults


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.zeros(2), -torch.zeros(2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: 2}, {"1": 2}),
        ([0.0], [-0.0]),
        ({0.5, float("nan")}, {0.25, float("nan")}),
        ({float("nan"): 1}, {float("nan"): 2}),
        ((1,), [1]),
        (True, 1),
        (np.arange(3), np.arange(3)[::-1]),
        (np.array([1, None], dtype=object), np.array([1, 2], dtype=object)),
        (io.BytesIO(b"x"), io.BytesIO(b"y")),
        (torch.eye(2).to_sparse(), (torch.eye(2) * 2).to_sparse()),
    ],
    ids=[
        "dtype",
        "sign of zero",
        "order of a dict",
        "kind of a key",
        "sign of a zero",
        "set",
        "dict",
        "kind of a sequence",
        "bool",
        "order of an array",
        "objects",
        "stream",
        "sparse",
    ],
)
def test_what_differs_is_not_equal(found: object, wanted: object) -> None:
    assert equal(found, found)
    assert equal(wanted, wanted)
    assert not equal(found, wanted)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
def test_case_110_the_same_for_long(target: str, tmp_path: Path) -> None:
    fuzz(target, SEED, 1 << 60, SECONDS, tmp_path)
