"""Plans of all keys and ranks in one exchange."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from dcpfs.checkpointer.choices import DedupPolicy
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.step_plan import (
    GlobalPlan,
    PlanCache,
    decode_assigned,
    decode_local_plans,
    decode_results,
    encode_local_plans,
    encode_results,
    plan_globally,
    plan_step,
)
from dcpfs.config import Trust
from dcpfs.dcp.accounting import account
from dcpfs.dcp.flatten import STRUCTURE_ATTRIBUTE
from dcpfs.dcp.save_planner import SavePlanner
from dcpfs.errors import ConfigError, IncompleteCheckpointError, ReplicaMismatchError, UnsupportedValueError
from tests.unit.checkpointer.simulated_ranks import (
    ItemReadingWriter,
    PathWriter,
    Shard,
    local_steps,
    results_of,
    rows,
)

State = Mapping[str, object]
Keys = Mapping[str, State]

LARGE = torch.empty(1 << 18)  # 1 MiB of float32, the least that is balanced


def fsdp(rank: int, world_size: int) -> dict[str, dict[str, object]]:
    """Parameters by rows, uneven and empty parts among them; replicas; nested and odd keys; what only one rank has."""
    model: dict[str, object] = {}
    for layer in range(3):
        model[f"layers.{layer}.weight"] = rows((10, 4), rank, world_size)
        model[f"layers.{layer}.bias"] = rows((3,), rank, world_size, torch.bfloat16)
        model[f"layers.{layer}.count"] = torch.tensor(layer)
    model["large"] = LARGE
    optim: dict[str, object] = {f"state.layers.{n}.exp_avg": rows((10, 4), rank, world_size) for n in range(3)}
    optim |= {f"param_groups.layers.{n}.lr": 0.1 for n in range(3)}
    trainer: dict[str, object] = {"iteration": 5, f"rng.rank_{rank}": b"state of a rank" * (rank + 1)}
    return {"model": model, "optim": optim, "trainer": trainer}


def hsdp(rank: int, world_size: int) -> dict[str, dict[str, object]]:
    """Two replicas of each row."""
    half = max(1, world_size // 2)
    return {"model": {f"w{n}": rows((4096, 1024), rank % half, half) for n in range(6)}}


def pipeline(rank: int, world_size: int) -> dict[str, dict[str, object]]:
    """Other tensors on each rank, one of them tied; cut along the second dimension."""
    own = {f"stage.{rank}.{n}": torch.full((2, n + 1), float(rank)) for n in range(3)}
    tied = Shard((4, 2 * world_size), (0, 2 * rank), (4, 2))
    return {"model": {**own, "tied": tied, "embedding": LARGE}, "empty": {}}


SCENES = [fsdp, hsdp, pipeline]


def plan_all(states: Sequence[Keys], dedup: DedupPolicy = DedupPolicy.BALANCED) -> tuple[list[LocalStep], GlobalPlan]:
    steps = local_steps(states)
    writers = {key: PathWriter("/nowhere") for key in states[0]}
    return steps, plan_globally([encode_local_plans(step) for step in steps], writers, dedup)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("scene", SCENES)
def test_local_plans_survive_the_trip(scene: Callable[[int, int], Keys], world_size: int) -> None:
    for step in local_steps([scene(rank, world_size) for rank in range(world_size)]):
        decoded = decode_local_plans(encode_local_plans(step))
        assert decoded == {key: each.plan for key, each in step.keys.items()}
        for key, plan in decoded.items():
            assert [each.index.index for each in plan.items] == [each.index.index for each in step.keys[key].plan.items]


@pytest.mark.parametrize("dedup", list(DedupPolicy))
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("scene", SCENES)
def test_equals_what_the_planner_does_with_all_items(
    scene: Callable[[int, int], Keys], world_size: int, dedup: DedupPolicy
) -> None:
    steps, planned = plan_all([scene(rank, world_size) for rank in range(world_size)], dedup)
    assigned = [decode_assigned(data, step) for data, step in zip(planned.assigned, steps, strict=True)]
    for key, metadata in planned.metadata().items():
        expected, contents = SavePlanner().create_global_plan([step.keys[key].plan for step in steps])
        assert list(metadata.state_dict_metadata.items()) == list(contents.state_dict_metadata.items())
        assert metadata.planner_data == contents.planner_data
        assert getattr(metadata, STRUCTURE_ATTRIBUTE) == getattr(contents, STRUCTURE_ATTRIBUTE)
        written = Counter(item.index for mine in assigned for item in mine[key].items)
        assert written == Counter(item.index for plan in expected for item in plan.items), "each chunk once"
        hints = {item.index: item.index.index for plan in expected for item in plan.items}
        for step, mine in zip(steps, assigned, strict=True):
            held = [item.index for item in step.keys[key].plan.items]
            places = [held.index(item.index) for item in mine[key].items]
            assert places == sorted(places), "held, and in the order of the state"
            for item in mine[key].items:
                assert item.index.index == hints[item.index]
                assert item.type is step.keys[key].plan.items[held.index(item.index)].type


def test_case_71_small_replicas_go_to_one_file() -> None:
    steps, planned = plan_all([fsdp(rank, 4) for rank in range(4)])
    mine = [decode_assigned(data, step)["model"] for data, step in zip(planned.assigned, steps, strict=True)]
    assert [sum("count" in item.index.fqn for item in plan.items) for plan in mine] == [3, 0, 0, 0]


def test_case_73_large_replicas_are_balanced_over_all_keys() -> None:
    states = [
        {"model": {f"w{n}": LARGE for n in range(4)}, "optim": {f"m{n}": LARGE for n in range(4)}} for _ in range(4)
    ]
    steps, planned = plan_all(states)
    counts = [
        sum(len(plan.items) for plan in decode_assigned(data, step).values())
        for data, step in zip(planned.assigned, steps, strict=True)
    ]
    assert counts == [2, 2, 2, 2]
    steps, planned = plan_all(states, DedupPolicy.LOWEST_RANK)
    last = decode_assigned(planned.assigned[3], steps[3])
    assert not any(plan.items for plan in last.values())


def test_case_8_values_of_the_trainer_that_differ_are_refused() -> None:
    states = [{"model": {}, "trainer": {"seed": rank, "iteration": 5}} for rank in range(3)]
    with pytest.raises(ReplicaMismatchError, match=r"'seed' under the key 'trainer' differ between ranks"):
        plan_all(states)
    plan_all([{"trainer": {f"rank_{rank}": torch.tensor([rank]), "iteration": 5}} for rank in range(3)])


def test_case_8_other_values_that_differ_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    states = [{"model": {"seed": rank, "same": 1, "t": torch.tensor(rank > 1)}} for rank in range(3)]
    with caplog.at_level(logging.WARNING):
        steps, planned = plan_all(states)
    assert "'seed', 't' under the key 'model'" in caplog.text
    caplog.clear()
    assigned = [decode_assigned(data, step) for data, step in zip(planned.assigned, steps, strict=True)]
    results = [
        encode_results({"model": results_of(each["model"], rank)}, step, each)
        for rank, (step, each) in enumerate(zip(steps, assigned, strict=True))
    ]
    planned.check_values(results)
    assert not caplog.text


def test_case_8_values_are_compared_when_plans_are_cached_too() -> None:
    steps, planned = plan_all([{"trainer": {"counter": 5, "draws": 1}} for _ in range(3)])
    later = local_steps([{"trainer": {"counter": 6, "draws": 1 if rank < 2 else 2}} for rank in range(3)])
    assert [step.digest for step in later] == [step.digest for step in steps]
    results = []
    for rank, step in enumerate(later):
        assigned = decode_assigned(planned.assigned[rank], step)
        results.append(encode_results({"trainer": results_of(assigned["trainer"], rank)}, step, assigned))
    with pytest.raises(ReplicaMismatchError, match="'draws' under the key 'trainer'"):
        planned.check_values(results)


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([{"model": {"a": 1}}, {"model": {"a": torch.ones(2)}}], r"'a' is no tensor on rank 0 and a torch.float32"),
        ([{"model": {"a": torch.ones(2)}}, {"model": {"a": torch.ones(2).double()}}], "torch.float64"),
        ([{"model": {"a": torch.ones(2)}}, {"model": {"a": torch.ones(3)}}], r"shape \(3,\) on rank 1"),
        ([{"model": {}}, {"model": {}, "extra": {}}], "rank 1 the keys model, extra"),
        ([{"model": {}, "extra": {}}, {"extra": {}, "model": {}}], "same order"),
        (
            [{"model": {"a": Shard((8,), (0,), (4,))}}, {"model": {"a": Shard((8,), (0,), (8,))}}],
            r"at \(0,\) rank 0 holds a part of shape \(4,\) and rank 1 one of \(8,\)",
        ),
    ],
)
def test_ranks_that_disagree_are_refused_by_name(states: Sequence[Keys], text: str) -> None:
    with pytest.raises(ReplicaMismatchError, match=text):
        plan_all(states)


@pytest.mark.parametrize(
    "shards", [[Shard((8,), (0,), (4,)), Shard((8,), (5,), (3,))], [Shard((8,), (0,), (5,)), Shard((8,), (4,), (4,))]]
)
def test_shards_that_do_not_cover_a_tensor_are_refused(shards: list[Shard]) -> None:
    with pytest.raises(UnsupportedValueError, match=r"'a'.*don't fit together \(in the state of the key 'model'\)"):
        plan_all([{"model": {"a": shard}} for shard in shards])


@pytest.mark.parametrize("scene", SCENES)
def test_results_survive_the_trip(scene: Callable[[int, int], Keys]) -> None:
    steps, planned = plan_all([scene(rank, 4) for rank in range(4)])
    collected: dict[str, list[object]] = {}
    for rank, step in enumerate(steps):
        assigned = decode_assigned(planned.assigned[rank], step)
        written = {key: results_of(plan, rank) for key, plan in assigned.items()}
        decoded = decode_results(encode_results(written, step, assigned), planned, rank)
        for key, results in written.items():
            assert [(each.index, each.index.index, each.size_in_bytes) for each in decoded[key]] == [
                (each.index, each.index.index, each.size_in_bytes) for each in results
            ]
            assert [vars(each.storage_data) for each in decoded[key]] == [vars(each.storage_data) for each in results]
            collected.setdefault(key, []).append(decoded[key])
    for key, metadata in planned.metadata().items():
        account(metadata, collected[key], where="the test")  # type: ignore[arg-type]  # lists of results


def test_results_that_are_missing_are_noticed() -> None:
    steps, planned = plan_all([fsdp(rank, 2) for rank in range(2)])
    collected = []
    for rank, step in enumerate(steps):
        assigned = decode_assigned(planned.assigned[rank], step)
        written = {key: results_of(plan, rank)[rank:] for key, plan in assigned.items()}
        collected.append(decode_results(encode_results(written, step, assigned), planned, rank)["model"])
    with pytest.raises(IncompleteCheckpointError, match="layers\\.0\\.weight"):
        account(planned.metadata()["model"], collected, where="the test")


def test_other_storage_writers_are_asked_with_items() -> None:
    steps = local_steps([fsdp(rank, 3) for rank in range(3)])
    reading, path = ItemReadingWriter(), PathWriter("/nowhere")
    writers = {"model": reading, "optim": path, "trainer": path}
    planned = plan_globally([encode_local_plans(step) for step in steps], writers)
    for rank, step in enumerate(steps):
        mine = decode_assigned(planned.assigned[rank], step)
        assert mine["model"].storage_data == f"prefix {rank}"
        assert mine["optim"].storage_data is None
        assert reading.seen[rank].items == mine["model"].items


class TestCache:
    """What is remembered of an exchange."""

    def plan(self, model: State, **options: object) -> LocalStep:
        return plan_step(5, {"model": model}, **options)  # type: ignore[arg-type]  # of this test

    def test_case_74_is_kept_while_the_structure_stays(self) -> None:
        cache = PlanCache()
        step = self.plan({"w": torch.ones(3), "n": 1})
        assert not cache.matches(step)
        assert cache.token(step) == 0
        planned = plan_globally([encode_local_plans(step)], {"model": PathWriter("/nowhere")})
        cache.remember(step, planned.assigned[0], planned)
        later = self.plan({"w": torch.zeros(3), "n": 2})
        assert cache.token(later) == planned.exchange_id > 0
        assert cache.assigned(later) == decode_assigned(planned.assigned[0], step)
        first, second = cache.metadata()["model"], cache.metadata()["model"]
        assert first is not second
        assert first.state_dict_metadata is not second.state_dict_metadata
        cache.drop()
        assert not cache.matches(later)
        assert cache.planned is None

    @pytest.mark.parametrize(
        "other",
        [
            {"w": torch.ones(4), "n": 1},
            {"w": torch.ones(3).double(), "n": 1},
            {"w": torch.ones(3, requires_grad=True), "n": 1},
            {"w": torch.ones(3), "m": 1},
            {"n": 1, "w": torch.ones(3)},
            {"w": torch.ones(3), "n": torch.tensor(1)},
            {"w": torch.ones(3), "n": {1: 1}},
            {"w": torch.ones(3), "n": {"1": 1}},
            {"w": torch.ones(3), "n": 1, "e": {}},
            {"w": torch.ones(3)},
        ],
    )
    def test_case_74_is_not_used_for_another_structure(self, other: State) -> None:
        digests = {self.plan(state).digest for state in ({"w": torch.ones(3), "n": 1}, other)}
        assert len(digests) == 2

    def test_case_74_world_and_policy_count(self) -> None:
        state = {"w": torch.ones(3)}
        digests = {
            self.plan(state).digest,
            self.plan(state, world_size=2).digest,
            self.plan(state, dedup=DedupPolicy.LOWEST_RANK).digest,
            plan_step(5, {"optim": state}).digest,
        }
        assert len(digests) == 4
        assert max(digests) < 1 << 63


class TestPlanStep:
    """One rank's part."""

    def test_brings_plans_values_and_files(self) -> None:
        weight = torch.arange(4.0)
        step = plan_step(
            7,
            {"model": {"w": weight}, "trainer": {"iteration": 7}},
            rank_files={"dataloader/rank_0.pkl": b"x"},
            metric=0.5,
            topology={"mesh_shape": [1]},
        )
        (item,) = step.keys["model"].plan.items
        assert step.keys["model"].values.resolve_data(item) is weight
        assert (step.iteration, step.rank_files, step.metric, step.topology) == (
            7,
            {"dataloader/rank_0.pkl": b"x"},
            0.5,
            {"mesh_shape": [1]},
        )

    def test_refuses_what_cannot_be_stored_by_name(self) -> None:
        with pytest.raises(UnsupportedValueError, match=r"'a\.b'.*\(in the state of the key 'model'\)"):
            plan_step(5, {"model": {"a": {"b": torch.empty(2, device="meta")}}})
        with pytest.raises(UnsupportedValueError, match="'f'"):
            plan_step(5, {"model": {"f": lambda: None}})
        plan_step(5, {"model": {"f": local_function}}, trust=Trust.PICKLE)
        with pytest.raises(ConfigError, match="names a directory"):
            plan_step(5, {"../model": {}})

    def test_odd_keys_survive(self) -> None:
        state = {"\ud800 \0\n,\"'": 1, "": torch.ones(1), "ä.ö": {"x": [torch.ones(1), 2]}, "ints": {0: 1, 5: 2}}
        step = plan_step(5, {"model": state})
        assert decode_local_plans(encode_local_plans(step))["model"] == step.keys["model"].plan
        planned = plan_globally([encode_local_plans(step)], {"model": PathWriter("/nowhere")})
        assert list(planned.metadata()["model"].state_dict_metadata) == list(
            step.keys["model"].plan.planner_data.structure.paths
        )


def local_function() -> None:
    """What the allow-list refuses."""
