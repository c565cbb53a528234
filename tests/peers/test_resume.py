"""What a run starts from, in one process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dcpfs.checkpointer.load_step import StepLoadReport
from dcpfs.checkpointer.renaming import Renaming
from dcpfs.checkpointer.resume import Origin, ResumePlan, ResumeRules, ResumeSearch, load_with_fallback
from dcpfs.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    KeyMismatchError,
)
from dcpfs.storage.location import Location
from tests.peers.step_making import flip_byte, make_foreign_step, make_step

_ALL = ("model", "optim", "scheduler", "trainer", "dataloader")


def _full(count: int, number: float) -> torch.Tensor:
    return torch.full((count,), float(number))


def _values(number: float) -> dict[str, dict[str, object]]:
    return {
        "model": {"w": _full(4, number), "v": _full(2, -number)},
        "optim": {"state.w.exp_avg": _full(4, number / 2)},
        "scheduler": {"last_epoch": int(number)},
        "trainer": {"iteration": int(number)},
    }


def _parts() -> dict[str, dict[str, object]]:
    return {**_values(0), "dataloader": {"position": 0}}


def _make(root: Path, iteration: int) -> Location:
    return make_step(root, iteration, _values(iteration), rank_state={"position": iteration})


def _search(save_dir: Path, load_path: Path | None = None, **rules: object) -> ResumeSearch:
    made = ResumeRules(**rules)  # type: ignore[arg-type]  # what the test gives
    return ResumeSearch(Location(str(save_dir)), None if load_path is None else Location(str(load_path)), made)


def _find(save_dir: Path, load_path: Path | None = None, **rules: object) -> ResumePlan:
    with _search(save_dir, load_path, **rules) as search:
        return search.find()


def _load(
    parts: dict[str, dict[str, object]], search: ResumeSearch, **arguments: object
) -> tuple[ResumePlan, StepLoadReport]:
    with search:
        return load_with_fallback(parts, search, search.find(), **arguments)  # type: ignore[arg-type]  # as given


def _numbers(parts: dict[str, dict[str, object]]) -> list[float]:
    w, m = parts["model"]["w"], parts["optim"]["state.w.exp_avg"]
    assert isinstance(w, torch.Tensor)
    assert isinstance(m, torch.Tensor)
    assert len(set(w.tolist())) == len(set(m.tolist())) == 1
    position = parts["dataloader"]["position"]
    assert isinstance(position, int)
    return [float(w[0]), float(m[0]) * 2, float(position)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run with three steps."""
    for iteration in (1, 2, 3):
        _make(tmp_path / "run", iteration)
    yield tmp_path / "run"
    shutil.rmtree(tmp_path)


def test_the_latest_step_is_resumed_whatever_load_path_says(run: Path, tmp_path: Path) -> None:
    parts = _parts()
    plan, report = _load(parts, _search(run, tmp_path / "nothing"))
    assert (plan.origin, plan.iteration, plan.keys) == (Origin.RESUME, 3, _ALL)
    assert plan.url == str(run / "iter_000000003")
    assert _numbers(parts) == [3, 3, 3]
    assert report.states["dataloader"] == {"position": 3}


@pytest.mark.parametrize(("rules", "iteration"), [({"load_step": 2}, 2), ({"keys_not_to_resume": ("trainer",)}, 3)])
def test_the_iteration_is_the_steps(run: Path, rules: dict[str, object], iteration: int) -> None:
    parts = _parts()
    plan, _ = _load(parts, _search(run, None, **rules))
    assert plan.iteration == iteration
    assert _numbers(parts) == [iteration] * 3


def test_from_scratch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = _find(tmp_path)
    assert (plan.origin, plan.iteration, plan.keys, plan.url) == (Origin.SCRATCH, 0, (), None)
    assert "from scratch" in caplog.text


@pytest.mark.parametrize("place", ["run", "step", "key"])
@pytest.mark.parametrize("rules", [{}, {"only_load_scheduler_state": True}, {"load_training_state": True}])
def test_a_warm_start(run: Path, tmp_path: Path, place: str, rules: dict[str, object]) -> None:
    path = {"run": run, "step": run / "iter_000000002", "key": run / "iter_000000002/model"}[place]
    number = 3 if place == "run" else 2
    training = bool(rules.get("load_training_state"))
    plan = _find(tmp_path / "new", path, **rules)
    assert plan.origin is Origin.WARM_START
    assert plan.iteration == (number if training else 0)
    parts = _parts()
    if place == "key" and rules:
        with pytest.raises(KeyMismatchError, match="'scheduler'"):
            _load(parts, _search(tmp_path / "new", path, **rules))
        return
    _load(parts, _search(tmp_path / "new", path, **rules))
    assert _numbers(parts) == ([number] * 3 if training else [number, 0, 0])
    assert parts["scheduler"]["last_epoch"] == (number if rules else 0)


def test_a_warm_start_renames_and_a_resume_does_not(run: Path, tmp_path: Path) -> None:
    parts: dict[str, dict[str, object]] = {"model": {"x": torch.zeros(4)}}
    renaming = Renaming({"^w$": "x"}, skip=["^v$"])
    _load(parts, _search(tmp_path / "new", run), renaming=renaming)
    assert parts["model"]["x"].tolist() == [3.0] * 4  # type: ignore[attr-defined]  # a tensor
    whole = _parts()
    _load(whole, _search(run), renaming=renaming)
    assert _numbers(whole) == [3, 3, 3]


def test_a_missing_optimizer_of_a_warm_start_is_a_warning_and_of_a_resume_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = _values(5)
    del values["optim"]
    make_foreign_step(tmp_path / "run", "iter_000000005", values, rank_state={"position": 5})
    parts = _parts()
    _load(parts, _search(tmp_path / "new", tmp_path / "run", load_training_state=True))
    assert "has no 'optim'" in caplog.text
    assert _numbers(parts) == [5, 0, 5]
    with pytest.raises(KeyMismatchError, match="'optim'"):
        _load(_parts(), _search(tmp_path / "run"))
    _load(parts, _search(tmp_path / "run", keys_not_to_resume=("optim",)))


def test_the_iteration_of_a_load_path_of_another_name(run: Path, tmp_path: Path) -> None:
    # Ours is known by its manifest, another tool's by nothing.
    (run / "iter_000000002").rename(tmp_path / "best")
    assert _find(tmp_path / "new", tmp_path / "best", load_training_state=True).iteration == 2
    make_foreign_step(tmp_path, "bare", _values(4), latest=False)
    assert _find(tmp_path / "new", tmp_path / "bare").iteration == 0
    with pytest.raises(CheckpointError, match="iteration"):
        _find(tmp_path / "new", tmp_path / "bare", load_training_state=True)


def test_load_step_of_a_load_path(run: Path, tmp_path: Path) -> None:
    assert _find(tmp_path / "new", run, load_step=1, load_training_state=True).iteration == 1
    # The run itself has steps: the step that is asked for is one of them, or an error.
    with pytest.raises(CheckpointNotFoundError):
        _find(run, run, load_step=9)


@pytest.mark.parametrize("path", ["nothing", "run/iter_000000009"])
def test_a_load_path_that_is_not_there(run: Path, tmp_path: Path, path: str) -> None:
    del run
    with pytest.raises(CheckpointNotFoundError):
        _find(tmp_path / "new", tmp_path / path)


def test_extra_keys_of_the_step_belong_to_all(tmp_path: Path) -> None:
    make_step(tmp_path, 1, {**_values(1), "ema": {"w": torch.ones(2)}})
    plan = _find(tmp_path)
    assert (plan.keys, plan.extra_keys) == ((*_ALL, "ema"), ("ema",))
    parts = {key: value for key, value in _parts().items() if key != "dataloader"}
    _, report = _load(parts, _search(tmp_path))
    assert report.states["ema"]["w"].tolist() == [1.0, 1.0]  # type: ignore[index]  # a dict
    _, report = _load(parts, _search(tmp_path), read_extra=False)
    assert "ema" not in report.states


# --- falling back


def _damage(step: Path, key: str, number: float, size: int = 4) -> None:
    path = next(path for path in sorted((step / key).glob("*.distcp")))
    data = path.read_bytes()
    flip_byte(path, data.index(_full(size, number).numpy().tobytes()) + 1)


@pytest.mark.parametrize("key", ["model", "optim"])
@pytest.mark.parametrize("verify", [False, True])
def test_case_113_a_damaged_step_is_followed_by_the_next_best(
    run: Path, caplog: pytest.LogCaptureFixture, key: str, *, verify: bool
) -> None:
    _damage(run / "iter_000000003", key, 3 if key == "model" else 1.5)
    parts = _parts()
    plan, _ = _load(parts, _search(run, verify=verify))
    assert plan.iteration == 2
    assert _numbers(parts) == [2, 2, 2]
    assert "passed over" in caplog.text


def test_all_damaged_is_an_error_that_says_what_was_changed(run: Path) -> None:
    for number in (1, 2, 3):
        _damage(run / f"iter_00000000{number}", "model", number)
    with pytest.raises(CorruptCheckpointError, match="none can be used") as caught:
        _load(_parts(), _search(run))
    assert "model" in caught.value.written_keys
    with pytest.raises(CorruptCheckpointError, match="none can be used") as caught:
        _load(_parts(), _search(run, verify=True))
    assert caught.value.written_keys == ()


def test_a_step_that_was_asked_for_has_no_next_best(run: Path, tmp_path: Path) -> None:
    _damage(run / "iter_000000003", "model", 3)
    with pytest.raises(CorruptCheckpointError, match="load_step"):
        _load(_parts(), _search(run, load_step=3))
    with pytest.raises(CorruptCheckpointError, match="load_path"):
        _load(_parts(), _search(tmp_path / "new", run / "iter_000000003"))
    parts = _parts()
    plan, _ = _load(parts, _search(tmp_path / "new", run, load_training_state=True))
    assert plan.iteration == 2
    assert _numbers(parts) == [2, 2, 2]


def test_a_mix_is_not_left_by_a_fallback_that_holds_less(tmp_path: Path) -> None:
    make_step(tmp_path, 1, {"model": {"v": _full(2, -1)}})
    make_step(tmp_path, 2, {"model": _values(2)["model"]})
    _damage(tmp_path / "iter_000000002", "model", -2, 2)
    parts = {"model": _values(0)["model"]}
    with pytest.raises(CheckpointError, match="can't fall back") as caught:
        _load(parts, _search(tmp_path), strict=False)
    assert caught.value.written_keys == ("model",)
