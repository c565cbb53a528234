from __future__ import annotations

from dcpfs.dcp.replicas import BoxId, share_plan


def _box(number: int) -> BoxId:
    return BoxId("f", number, (0,), (4,))


def test_case_72_shared_boxes_are_read_once_and_owned_evenly() -> None:
    everything = {_box(n): 100 for n in range(40)}
    shares = share_plan([everything] * 4)
    assert sorted(share.box for share in shares) == sorted(everything)
    loads = [sum(s.size_bytes for s in shares if s.owner == rank) for rank in range(4)]
    assert loads == [1000] * 4
    assert all(share.needers == (0, 1, 2, 3) for share in shares)


def test_only_those_who_need_a_box_take_part() -> None:
    needs = [{_box(1): 10, _box(2): 90}, {_box(1): 10}, {_box(3): 50}, {_box(3): 50}]
    shares = {share.box: share for share in share_plan(needs)}
    assert shares[_box(1)].needers == (0, 1)
    assert shares[_box(1)].owner == 1  # rank 0 has 90 bytes of its own
    assert shares[_box(3)].needers == (2, 3)
    assert _box(2) not in shares


def test_the_plan_is_the_same_on_every_rank() -> None:
    first = [{_box(n): n + 1 for n in range(20)}, {_box(n): n + 1 for n in range(10, 30)}]
    again = [dict(reversed(boxes.items())) for boxes in first]
    assert share_plan(first) == share_plan(again)
