"""The script for machines with a GPU runs, and finds what is wrong; on the CPU where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection

import pytest
import torch

from benchmarks import gpu_check
from dcpfs.background.arena import Arena


@pytest.mark.timeout(1800)
def test_all_checks_run_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    report = gpu_check.run(1, torch.device("cpu"))
    assert report["ok"], json.dumps(report, indent=1)
    checks = report["checks"]
    assert isinstance(checks, dict)
    assert set(checks) == {"arena", "host staging", "async", "async_with_pinned_mem", "disabled", "random states"}
    assert json.loads(json.dumps(report)) == report
    assert capsys.readouterr().err.count(": ok (") == len(checks)


@pytest.mark.timeout(1800)
def test_a_copy_that_is_not_made_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(arena: Arena, tensors: list[torch.Tensor], *, first: Collection[int] = ()) -> list[torch.Tensor]:
        return tensors  # nothing is copied

    monkeypatch.setattr(Arena, "stage", stage)
    found = gpu_check.run(1, torch.device("cpu"))
    checks = found["checks"]
    assert isinstance(checks, dict)
    assert not found["ok"]
    assert "wrong values in" in checks["arena"]["error"]
    assert "holds other values in" in checks["async"]["error"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_checks_pass_on_the_gpu() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--size-mb", "256"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
