"""Groups of the checkpointer's own: for all ranks, for some, again and again."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dcpfs.checkpointer.groups import close_group, global_rank, make_group
from dcpfs.errors import ConfigError
from dcpfs.ranks import Ranks
from tests.multiprocess.gloo import run_ranks


def exchange_in_whole_world() -> list[list[int]]:
    seen = []
    for _ in range(3):
        first, second = (make_group(timeout_seconds=60) for _ in range(2))
        assert first.group is not second.group
        assert first.group is not dist.group.WORLD
        seen += [first.all_gather(first.rank), second.all_gather(second.rank)]
        for ranks in (first, second, first):
            close_group(ranks)
    return seen


def exchange_among_some() -> list[list[int]]:
    rank = dist.get_rank()
    dist.new_group([0, 2], backend="gloo")  # rank 0 belongs to more groups than rank 1
    members = [dist.new_group(each, backend="gloo") for each in ([0, 1], [1, 2], [0, 1])]
    seen = []
    for group, ranks_of_group in zip(members, ([0, 1], [1, 2], [0, 1]), strict=True):
        if rank not in ranks_of_group:
            with pytest.raises(ConfigError, match="not a member"):
                make_group(group, timeout_seconds=60)
            continue
        for _ in range(2):
            own = make_group(group, timeout_seconds=60)
            assert ranks_of_group[own.rank] == rank == global_rank(own)
            seen.append(own.all_gather(rank))
            close_group(own)
    dist.barrier()
    return seen


def save_beside_training(rounds: int) -> int:
    """A thread exchanges on its own group while the main thread's collectives go on on the default one."""
    saver = make_group(timeout_seconds=60)
    seen: list[list[int]] = []

    def work() -> None:
        seen.extend(saver.all_gather(round_) for round_ in range(rounds))

    thread = threading.Thread(target=work)
    thread.start()
    total = torch.zeros(1)
    for _ in range(rounds):
        step = torch.ones(1)
        dist.all_reduce(step)
        dist.barrier()
        total += step
    thread.join()
    close_group(saver)
    assert seen == [[round_] * dist.get_world_size() for round_ in range(rounds)]
    return int(total.item())


def wait_for_a_rank_that_does_not_come() -> str:
    ranks = make_group(timeout_seconds=5)
    came = make_group(timeout_seconds=60)
    text = ""
    if ranks.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            ranks.all_gather("here")
        text = str(caught.value)
    came.all_gather(None)
    return text


def close_after_the_trainer() -> None:
    ranks = make_group(timeout_seconds=60)
    ranks.all_gather(None)
    dist.barrier()
    dist.destroy_process_group()
    close_group(ranks)


def test_groups_of_all_ranks_are_made_and_closed_again_and_again() -> None:
    assert run_ranks(exchange_in_whole_world, 2) == [[[0, 1]] * 6] * 2


def test_groups_of_some_ranks_need_no_others_however_many_groups_each_belongs_to() -> None:
    assert run_ranks(exchange_among_some, 3) == [
        [[0, 1]] * 4,
        [[0, 1], [0, 1], [1, 2], [1, 2], [0, 1], [0, 1]],
        [[1, 2]] * 2,
    ]


def test_cases_50_108_a_save_exchanges_on_its_own_group_while_training_uses_its_own() -> None:
    assert run_ranks(save_beside_training, 2, 30) == [60, 60]


def test_case_108_an_exchange_waits_as_long_as_its_own_timeout_says() -> None:
    texts = run_ranks(wait_for_a_rank_that_does_not_come, 2)
    assert "imed out" in texts[0] or "imeout" in texts[0]


def test_a_group_is_closed_without_complaint_after_all_groups_were() -> None:
    run_ranks(close_after_the_trainer, 2)


def test_without_a_process_group_this_process_is_alone() -> None:
    ranks = make_group(timeout_seconds=1)
    assert ranks == Ranks(0, 1, None)
    assert global_rank(ranks) == 0
    close_group(ranks)


def meet_a_group_of_some_that_can_not_move_cpu_objects() -> list[list[int]]:
    rank = dist.get_rank()
    some = dist.new_group([0, 1], backend="cuda:gloo")
    seen = [Ranks.current(some).all_gather(rank)] if rank < 2 else [[]]
    everybody = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    return [*seen, Ranks.current(everybody).all_gather(rank)]


def test_the_cpu_twin_of_a_group_of_some_ranks_is_made_by_them_alone_and_later_groups_still_meet() -> None:
    seen = run_ranks(meet_a_group_of_some_that_can_not_move_cpu_objects, 3)
    assert seen == [[[0, 1], [0, 1, 2]], [[0, 1], [0, 1, 2]], [[], [0, 1, 2]]]


def meet_alone_and_with_others() -> list[list[int]]:
    """Groups of one rank, kept and closed by turns, beside those that torch's meshes make by members alone."""
    rank = dist.get_rank()
    seen = []
    parents = [dist.new_group([each], backend="gloo") for each in range(2)]
    own = [dist.new_group([rank], backend="gloo", use_local_synchronization=True)]
    some = dist.new_group([0, 1], backend="gloo")
    kept = []
    for number in range(6):
        alone = make_group(parents[rank], timeout_seconds=60) if rank < 2 else None
        if alone is not None:
            assert global_rank(alone) == rank
            assert alone.world_size == 1
            kept.append(alone)
            both = make_group(some, timeout_seconds=60)
            seen.append(both.all_gather(rank))
            kept.append(both)
        if number % 2 and kept:
            close_group(kept.pop(0))
        own.append(dist.new_group([rank], backend="gloo", use_local_synchronization=True))
    return seen


def test_groups_of_one_rank_and_of_some_take_no_name_that_is_taken() -> None:
    assert run_ranks(meet_alone_and_with_others, 3) == [[[0, 1]] * 6, [[0, 1]] * 6, []]
