"""The trainer key: iteration, scaler, random states by rank, the user's own state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from dcpfs.checkpointer.choices import RngPolicy
from dcpfs.checkpointer.random_state import capture_random_state, restore_random_state
from dcpfs.checkpointer.stored_value import TemplatePart
from dcpfs.checkpointer.trainer_state import TrainerState
from dcpfs.errors import ConfigError, CorruptCheckpointError
from dcpfs.format.objects import decode_object, encode_object
from tests.unit.checkpointer.part_exchange import equal_states, exchange, warnings_of


class Progress:
    """An object of the user's."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self.epoch, "seen": torch.full((2,), self.epoch)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["seen"].tolist() == [state_dict["epoch"]] * 2
        self.epoch = state_dict["epoch"]


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item(), random.gauss(0, 1), np.random.normal()]


def scaler(scale: float = 2.0**16) -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=scale)
    made.scale(torch.ones(()))
    return made


def test_random_states_go_on_where_they_stood_and_pass_the_allow_list() -> None:
    draw()
    captured = capture_random_state()
    expected = draw()
    stored = decode_object(encode_object(captured, key="rng.rank_0"))
    draw()
    restore_random_state(stored)
    assert draw() == expected
    assert equal_states(stored, captured)
    with pytest.raises(CorruptCheckpointError, match="restoring the random states"):
        restore_random_state((("torch", torch.zeros(3, dtype=torch.uint8)),))
    with pytest.raises(CorruptCheckpointError, match="restoring the random states"):
        restore_random_state(5)


def test_a_random_state_of_a_device_that_is_not_there_is_said(caplog: pytest.LogCaptureFixture) -> None:
    restore_random_state((("npu", (("current", torch.zeros(16, dtype=torch.uint8)),)),))
    assert "the random state of npu was saved, and is not restored" in warnings_of(caplog)


class FakeDevices:
    """Stands for torch.cuda: devices with a state each, one of them current."""

    def __init__(self, count: int, current: int, *, used: bool = True) -> None:
        self.states = {index: torch.full((4,), index, dtype=torch.uint8) for index in range(count)}
        self.current = current
        self.used = used

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state(self, device: int | None = None) -> torch.Tensor:
        return self.states[self.current if device is None else device].clone()

    def set_rng_state(self, new_state: torch.Tensor, device: int | None = None) -> None:
        self.states[self.current if device is None else device] = new_state.clone()


def use_devices(monkeypatch: pytest.MonkeyPatch, devices: FakeDevices) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)


def test_the_generator_of_the_current_device_is_restored_to_the_device_that_is_current_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_devices(monkeypatch, FakeDevices(4, current=3))
    captured = capture_random_state()
    target = FakeDevices(2, current=0)
    target.states[1].fill_(9)
    use_devices(monkeypatch, target)
    restore_random_state(captured)
    assert [state[0].item() for state in target.states.values()] == [3, 1]
    use_devices(monkeypatch, FakeDevices(1, current=0))
    assert len(dict(capture_random_state())["cuda"]) == 1  # type: ignore[arg-type]
    use_devices(monkeypatch, FakeDevices(2, current=0, used=False))
    assert "cuda" not in dict(capture_random_state())


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_another_bit_generator_of_numpy_travels_too(kind: type[np.random.BitGenerator]) -> None:
    generators: Any = np.random  # its stubs leave these two out
    before = generators.get_bit_generator()
    try:
        generators.set_bit_generator(kind(5))
        captured = decode_object(encode_object(capture_random_state(), key="rng.rank_0"))
        expected = draw()
        restore_random_state(captured)
        assert draw() == expected
    finally:
        generators.set_bit_generator(before)


class _Drawing:
    """Draws a number whenever its state is read."""

    def state_dict(self) -> dict[str, object]:
        return {"seed": draw()}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


@pytest.mark.parametrize("user", [_Drawing(), {"loader": _Drawing()}], ids=["object", "mapping"])
def test_a_resumed_run_goes_on_behind_what_was_drawn_while_the_state_was_read(user: Any) -> None:
    state: Any = TrainerState(7, user=user).state_dict()
    expected = draw()
    restore_random_state(state["rng"]["rank_0"])
    assert draw() == expected


def test_the_layout_is_fixed() -> None:
    state = TrainerState(7, grad_scaler=scaler(), user={"epoch": 3}, rank=2).state_dict()
    assert list(state) == ["iteration", "grad_scaler", "rng", "user"]
    assert state["iteration"] == 7
    assert list(state["rng"]) == ["rank_2"]  # type: ignore[call-overload]
    assert isinstance(TrainerState(), TemplatePart)
    assert TrainerState(5, rng=RngPolicy.NONE).state_dict() == {"iteration": 5}


@pytest.mark.parametrize("paths", [True, False], ids=["own checkpoint", "without paths"])
def test_everything_comes_back(paths: bool) -> None:
    loss = [0.5, 0.25]
    nested = {"best": {"loss": 0.1, "at": torch.tensor([1, 2])}, "history": loss, "progress": Progress(4)}
    saved = TrainerState(12, grad_scaler=scaler(8.0), user=nested, rank=1)
    state = saved.state_dict()
    expected = draw()
    own: dict[str, Any] = {"best": {"at": torch.zeros(2, dtype=torch.long)}, "progress": Progress(), "other": 1}
    memory, best = own["best"]["at"], own["best"]
    target_scaler = scaler(4.0)
    target = TrainerState(grad_scaler=target_scaler, user=own, rank=1)
    outcome = exchange(state, target, paths=paths)
    assert not outcome.missing
    assert not outcome.unexpected
    assert target.iteration == 12
    assert target.loaded_iteration
    assert target_scaler.get_scale() == 8.0
    assert draw() == expected
    target.restore_random_states()
    assert draw() == expected
    assert own["best"] is best
    assert best["at"] is memory
    assert best["loss"] == 0.1
    assert memory.tolist() == [1, 2]
    assert own["history"] == loss
    assert own["progress"].epoch == 4
    assert own["other"] == 1


def test_a_mapping_that_is_still_empty_gets_the_structure_that_was_saved() -> None:
    user: dict[str, object] = {"a": {1: torch.ones(1), "b": [torch.zeros(1), {"c": 2}]}, "empty": [], "t": (1, 2)}
    own: dict[str, object] = {}
    outcome = exchange(TrainerState(user=user).state_dict(), TrainerState(user=own))
    assert not outcome.unexpected
    assert equal_states(own, user)


def test_a_key_without_text_comes_back() -> None:
    loaded: dict[str, object] = {}
    exchange(TrainerState(user={"": 1, "a": {"": 2}}).state_dict(), TrainerState(user=loaded))
    assert loaded == {"": 1, "a": {"": 2}}


def test_case_8_each_rank_takes_its_own_random_states_and_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    rng: dict[str, object] = {}
    for rank in range(3):
        random.seed(rank)
        rng.update(TrainerState(3, rank=rank).state_dict()["rng"])  # type: ignore[call-overload]
    merged = {"iteration": 3, "rng": rng}
    random.seed(1)
    expected = random.random()
    outcome = exchange(merged, TrainerState(rank=1))
    assert random.random() == expected
    assert set(outcome.left_out) == {"rng.rank_0", "rng.rank_2"}
    assert not outcome.unexpected
    random.seed(99)
    before = random.getstate()
    outcome = exchange(merged, TrainerState(rank=3))
    assert random.getstate() == before
    assert "no random states of rank 3 were saved" in warnings_of(caplog)
    assert set(exchange(merged, TrainerState(rank=0, rng=RngPolicy.NONE)).left_out) == {
        f"rng.rank_{r}" for r in range(3)
    }


def test_what_only_one_side_has_is_said_and_no_mismatch(caplog: pytest.LogCaptureFixture) -> None:
    full = TrainerState(3, grad_scaler=scaler(), user={"epoch": 1}).state_dict()
    outcome = exchange(full, TrainerState(rng=RngPolicy.NONE))
    assert not outcome.unexpected
    assert {key.partition(".")[0] for key in outcome.left_out} == {"grad_scaler", "rng", "user"}
    bare = TrainerState(3, rng=RngPolicy.NONE).state_dict()
    own: dict[str, object] = {"epoch": 5}
    target_scaler = scaler(4.0)
    outcome = exchange(bare, TrainerState(grad_scaler=target_scaler, user=own))
    assert not outcome.missing
    assert own == {"epoch": 5}
    assert target_scaler.get_scale() == 4.0
    assert "no grad scaler was saved" in warnings_of(caplog)
    assert "of the trainer state no epoch was saved" in warnings_of(caplog)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    assert not exchange(full, TrainerState(grad_scaler=disabled)).unexpected
    assert not exchange({"grad_scaler": full["grad_scaler"]}, TrainerState()).missing  # of another tool


def test_case_14_values_are_read_at_each_save() -> None:
    user: dict[str, object] = {"epoch": 1}
    state = TrainerState(1, user=user)
    before = state.state_dict()
    user["epoch"] = 2
    assert (before["user"], state.state_dict()["user"]) == ({"epoch": 1}, {"epoch": 2})


def test_wrong_use_and_a_damaged_iteration_are_told() -> None:
    with pytest.raises(ConfigError, match="a grad scaler must have"):
        TrainerState(grad_scaler=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a int is neither"):
        TrainerState(user=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="can't name a step after iteration"):
        TrainerState(-1)
    with pytest.raises(CorruptCheckpointError, match="has the iteration 'x', which is none"):
        TrainerState().load_state_dict({"iteration": "x"})
