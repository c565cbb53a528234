"""The launcher itself: values by rank, failures with tracebacks, hung ranks killed."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.multiprocess.gloo import run_ranks, try_ranks


def _sum_of_ranks(offset: int) -> int:
    tensor = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(tensor)
    return int(tensor.item())


def _fail_on_one() -> int:
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    return dist.get_rank()


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def _hang_on_one() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def test_values_come_back_by_rank() -> None:
    assert run_ranks(_sum_of_ranks, 3, 10) == [33, 33, 33]


def test_a_failure_names_its_rank_and_traceback() -> None:
    with pytest.raises(AssertionError, match="rank one says no"):
        run_ranks(_fail_on_one, 2)


def test_a_dead_rank_is_reported() -> None:
    outcomes = try_ranks(_die_on_one, 2)
    assert (outcomes[1].error_type, outcomes[1].error_text) == ("ProcessDied", "exit code 7")


def test_a_hung_rank_is_killed_and_its_stack_shown() -> None:
    outcomes = try_ranks(_hang_on_one, 2, timeout_seconds=12)
    assert not outcomes[0].failed
    assert outcomes[1].error_type == "TimeoutError"
    assert "_hang_on_one" in outcomes[1].traceback_text
