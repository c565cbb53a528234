"""Loading whole steps in one process: ours, and those of plain ``dcp.save`` and pickled files."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

from dcpfs.checkpointer.choices import WorldSizePolicy
from dcpfs.checkpointer.load_step import KeyReport, StepLoadReport, Strictness, load_step
from dcpfs.checkpointer.model_state import ModelWrapper
from dcpfs.checkpointer.optimizer_state import OptimizersWrapper
from dcpfs.checkpointer.phases import Phases
from dcpfs.checkpointer.rank_state import RankResize
from dcpfs.checkpointer.renaming import Renaming
from dcpfs.checkpointer.stored_value import StoredValue
from dcpfs.config import VerifyMode
from dcpfs.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DcpfsError,
    IncompleteCheckpointError,
    KeyMismatchError,
    UntrustedDataError,
)
from dcpfs.storage.location import Location
from tests.peers.step_making import flip_byte, make_foreign_step, make_step, read_manifest, same

KEYS = ("model", "optim", "scheduler", "trainer", "dataloader")


class Net(nn.Module):
    def __init__(self, width: int = 6, head: str = "head") -> None:
        super().__init__()
        self.body = nn.Linear(4, width)
        self.add_module(head, nn.Linear(width, 2))
        self._head = head

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.get_submodule(self._head)(self.body(values))
        return output


class Trainer:
    """A small training run: all parts of it, as a checkpointer passes them."""

    def __init__(self, seed: int = 0, net: Net | None = None) -> None:
        torch.manual_seed(seed)
        self.net = Net() if net is None else net
        self.optimizer = AdamW(self.net.parameters(), lr=0.1, betas=(0.5, 0.75))
        self.scheduler = MultiStepLR(self.optimizer, milestones=[2, 3])
        self.trainer: dict[str, object] = {"iteration": 0, "user": {"seen": 0}}
        self.loader = Loader()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.net(torch.ones(3, 4)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.loader.position += 3
            self.trainer = {"iteration": self.loader.position // 3, "user": {"seen": self.loader.position}}

    def parts(self) -> dict[str, object]:
        return {
            "model": ModelWrapper(self.net),
            "optim": OptimizersWrapper(self.net, self.optimizer),
            "scheduler": self.scheduler,
            "trainer": self.trainer,
            "dataloader": self.loader,
        }

    def states(self) -> dict[str, dict[str, object]]:
        return {
            "model": ModelWrapper(self.net).state_dict(),
            "optim": OptimizersWrapper(self.net, self.optimizer).state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "trainer": dict(self.trainer),
        }

    def snapshot(self) -> dict[str, object]:
        """All values, detached from what training changes."""
        flat: dict[str, object] = {}
        for key, state in self.states().items():
            for name, value in state.items():
                flat[f"{key}/{name}"] = value.detach().clone() if isinstance(value, torch.Tensor) else repr(value)
        return {**flat, "loader": self.loader.position}


class Loader:
    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        position = state["position"]
        assert isinstance(position, int)
        self.position = position


def trained(steps: int = 3, seed: int = 1) -> Trainer:
    trainer = Trainer(seed)
    trainer.step(steps)
    return trainer


def save(root: Path, trainer: Trainer, iteration: int = 5, **extra: dict[str, object]) -> Location:
    return make_step(root, iteration, {**trainer.states(), **extra}, rank_state=trainer.loader.state_dict())


def load(step: Location, trainer: Trainer, **arguments: object) -> StepLoadReport:
    manifest = read_manifest(step) if (Path(step.path) / "manifest.json").exists() else None
    values: dict[str, object] = {"keys": KEYS, "manifest": manifest, **arguments}
    return load_step(trainer.parts(), step, **values)  # type: ignore[arg-type]  # what the test gives


@pytest.mark.parametrize("has_gradients", [False, True])
def test_cases_5_6_a_fresh_trainer_gets_everything(tmp_path: Path, *, has_gradients: bool) -> None:
    saved = trained()
    step = save(tmp_path, saved)
    fresh = Trainer(seed=2)
    if has_gradients:
        fresh.net(torch.ones(1, 4)).sum().backward()
    report = load(step, fresh)
    same(fresh.snapshot(), saved.snapshot())
    assert len(fresh.optimizer.state) == 4
    assert fresh.scheduler.milestones == Counter({2: 1, 3: 1})
    assert set(report.keys["optim"].loaded) >= {"state.body.weight.exp_avg", "param_groups.head.bias.betas"}
    assert report.requests > 0
    assert report.read_bytes > 0
    assert not report.absent
    assert report.states["dataloader"] == {"position": 9}
    saved.step()
    fresh.step()
    same(fresh.snapshot(), saved.snapshot())


def test_all_keys_are_read_together_in_few_requests(tmp_path: Path) -> None:
    phases = Phases()
    report = load(save(tmp_path, trained()), Trainer(), phases=phases)
    assert report.requests <= 8  # files of four keys, and their sizes where the end was not read
    assert [record.name for record in phases.records] == ["load metadata", "match", "read", "apply"]


def test_case_5_keys_nobody_asks_for_are_an_error_before_anything_is_changed(tmp_path: Path) -> None:
    step = save(tmp_path, trained())
    fresh = Trainer(seed=2)
    before = fresh.snapshot()
    # A plain optimizer as its own template has none of the moments.
    parts: dict[str, object] = {**fresh.parts(), "optim": fresh.optimizer}
    with pytest.raises(KeyMismatchError) as caught:
        load_step(parts, step, keys=KEYS, manifest=read_manifest(step))
    assert "optim/state.body.weight.exp_avg" in caught.value.unexpected
    assert caught.value.written_keys == ()
    same(fresh.snapshot(), before)


@pytest.mark.parametrize("owner", ["ours", "foreign"])
def test_case_93_strictness_is_by_key(tmp_path: Path, owner: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = trained()
    if owner == "ours":
        step = save(tmp_path, saved)
    else:
        step = Location(str(make_foreign_step(tmp_path, "iter_000000005", saved.states(), rank_state={"position": 9})))
    other = Trainer(seed=2, net=Net(head="new_head"))
    before = other.snapshot()
    with pytest.raises(KeyMismatchError) as caught:
        load(step, other)
    assert set(caught.value.missing) == {"model/new_head.weight", "model/new_head.bias"}
    assert {"model/head.weight", "optim/state.head.weight.exp_avg"} <= set(caught.value.unexpected)
    assert "closest: 'model/head.weight'" in str(caught.value)
    same(other.snapshot(), before)
    with caplog.at_level(logging.WARNING):
        report = load(step, other, strict={"model": Strictness.LOOSE, "optim": Strictness.REQUIRED})
    assert report.keys["model"].missing == ("new_head.weight", "new_head.bias")
    assert report.keys["model"].unexpected == ("head.weight", "head.bias")
    assert "new_head.weight" in caplog.text
    assert torch.equal(other.net.body.weight, saved.net.body.weight)
    same({"w": other.snapshot()["model/new_head.weight"]}, {"w": before["model/new_head.weight"]})


def test_mismatched_values_are_left_as_they_are(tmp_path: Path) -> None:
    step = save(tmp_path, trained())
    other = Trainer(seed=2, net=Net(width=7))
    weight = other.net.body.weight.detach().clone()
    with pytest.raises(KeyMismatchError, match="shape"):
        load(step, other)
    report = load(step, other, keys=["model"], strict=False)
    assert set(report.keys["model"].mismatched) == {"body.weight", "body.bias", "head.weight"}
    assert report.keys["model"].loaded == ("head.bias",)
    assert torch.equal(other.net.body.weight, weight)


def test_a_missing_key_is_an_error_before_anything_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = trained()
    states = saved.states()
    del states["optim"]
    step = make_step(tmp_path, 5, states, rank_state={"position": 9})
    fresh = Trainer(seed=2)
    before = fresh.snapshot()
    with pytest.raises(KeyMismatchError, match="'optim'") as caught:
        load(step, fresh)
    assert caught.value.missing == ("optim",)
    same(fresh.snapshot(), before)
    report = load(step, fresh, optional={"optim"})
    assert report.absent == ("optim",)
    assert "has no 'optim'" in caplog.text
    # A key that nobody passes may be absent.
    parts = fresh.parts()
    del parts["optim"]
    assert load_step(parts, step, keys=KEYS, manifest=read_manifest(step)).absent == ()


def test_a_part_nobody_passed_is_left_alone_and_extra_keys_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra: dict[str, object] = {"decay": torch.arange(3.0), "deep": {2: "two", "empty": {}}, "list": [torch.ones(2), 1]}
    step = save(tmp_path, trained(), ema=extra)
    fresh = Trainer(seed=2)
    with caplog.at_level(logging.INFO):
        report = load_step({"model": ModelWrapper(fresh.net)}, step, keys=["model"], manifest=read_manifest(step))
    assert report.left == ("optim", "scheduler", "trainer", "ema", "dataloader")
    assert "which nobody asked for" in caplog.text
    assert list(report.states) == ["model"]
    report = load(step, fresh, keys=(*KEYS, "ema"), read_whole=["ema"])
    read = report.states["ema"]
    assert isinstance(read, dict)
    assert read["deep"] == {2: "two", "empty": {}}
    assert torch.equal(read["decay"], torch.arange(3.0))
    assert torch.equal(read["list"][0], torch.ones(2))
    assert report.states["dataloader"] == {"position": 9}


def test_a_mapping_is_updated_in_place_and_stateful_values_in_it_get_their_state(tmp_path: Path) -> None:
    loader, target = Loader(), Loader()
    loader.position = 4
    step = make_step(tmp_path, 1, {"mine": {"loader": loader.state_dict(), "tensor": torch.ones(2), "deep": {"n": 3}}})
    tensor, deep = torch.zeros(2), {"n": 0}
    state: dict[str, object] = {"loader": target, "tensor": tensor, "deep": deep}
    load_step({"mine": state}, step, keys=["mine"], manifest=read_manifest(step))
    assert (state["tensor"], state["deep"], state["loader"]) == (tensor, deep, target)
    assert (tensor.tolist(), deep, target.position) == ([1.0, 1.0], {"n": 3}, 4)


def test_case_20_load_save_load_is_equal(tmp_path: Path) -> None:
    saved = trained()
    first = save(tmp_path, saved, 1)
    middle = Trainer(seed=2)
    load(first, middle)
    second = save(tmp_path, middle, 2)
    last = Trainer(seed=3)
    load(second, last)
    same(last.snapshot(), saved.snapshot())
    assert read_manifest(first).fingerprint == read_manifest(second).fingerprint


def test_the_reference_layout_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = trained()
    step = Location(str(make_foreign_step(tmp_path, "iter_000000005", saved.states(), rank_state={"position": 9})))
    fresh = Trainer(seed=2)
    load(step, fresh)
    same(fresh.snapshot(), saved.snapshot())
    # Without files of ranks: a warning.
    bare = Location(str(make_foreign_step(tmp_path, "iter_000000006", saved.states())))
    other = Trainer(seed=2)
    report = load(bare, other)
    assert report.absent == ("dataloader",)
    assert "written by another tool" in caplog.text or "has no 'dataloader'" in caplog.text
    assert other.loader.position == 0


# --- damage


def test_case_113_damage_says_what_was_changed(tmp_path: Path) -> None:
    step = save(tmp_path, trained())
    manifest = read_manifest(step)
    name = max(name for name in manifest.files if name.startswith("model/") and name.endswith(".distcp"))
    data = (Path(step.path) / name).read_bytes()
    weight = trained().net.body.weight.detach().numpy().tobytes()
    flip_byte(Path(step.path) / name, data.index(weight) + 5)
    with pytest.raises(CorruptCheckpointError, match=r"model/body\.weight") as caught:
        load(step, Trainer(seed=2))
    assert caught.value.written_keys == ("model",) or set(caught.value.written_keys) >= {"model"}
    assert "already changed" in str(caught.value)
    load(step, Trainer(seed=2), verify=VerifyMode.SIZES)


@pytest.mark.parametrize("name", ["optim/.metadata", "dataloader/rank_0.pkl"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damaged_small_files_are_found_before_anything_is_changed(tmp_path: Path, name: str, how: str) -> None:
    step = save(tmp_path, trained())
    manifest = read_manifest(step)
    path = Path(step.path) / name
    if how == "flip":
        flip_byte(path)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        path.unlink()
    fresh = Trainer(seed=2)
    before = fresh.snapshot()
    with pytest.raises(IncompleteCheckpointError if how == "gone" else CorruptCheckpointError) as caught:
        load_step(fresh.parts(), step, keys=KEYS, manifest=manifest)
    assert caught.value.written_keys == ()
    assert name.partition("/")[0] in str(caught.value)
    same(fresh.snapshot(), before)


def test_case_2_metadata_of_another_save_is_refused(tmp_path: Path) -> None:
    step = save(tmp_path, trained(1))
    manifest = read_manifest(step)
    other = save(tmp_path / "other", trained(2))
    metadata = (Path(other.path) / "model/.metadata").read_bytes()
    (Path(step.path) / "model/.metadata").write_bytes(metadata)
    with pytest.raises(CorruptCheckpointError, match="not the one"):
        load_step(Trainer().parts(), step, keys=KEYS, manifest=manifest)


def test_case_110_an_unsafe_rank_file_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    saved = trained()
    step = make_foreign_step(tmp_path, "iter_000000005", saved.states(), rank_state={"position": 9})
    bomb = b"cposix\nsystem\n(S'echo'\ntR."
    (step / "dataloader/rank_0.pkl").write_bytes(bomb)
    fresh = Trainer(seed=2)
    before = fresh.snapshot()
    with pytest.raises(UntrustedDataError):
        load(Location(str(step)), fresh)
    same(fresh.snapshot(), before)


# --- parts that fail


class Refusing:
    """Takes no state."""

    def state_dict(self) -> dict[str, object]:
        return {"iteration": 0, "user": {"seen": 0}}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        raise RuntimeError(f"no room for {len(state_dict)}")


def test_a_part_that_does_not_take_its_state_says_what_was_changed(tmp_path: Path) -> None:
    step = save(tmp_path, trained())
    parts = {**Trainer(seed=2).parts(), "trainer": Refusing()}
    with pytest.raises(CheckpointError, match="RuntimeError: no room for 2") as caught:
        load_step(parts, step, keys=KEYS, manifest=read_manifest(step))
    assert caught.value.written_keys == ("model", "optim", "scheduler", "trainer")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("part", [3, "text", (1, 2)])
def test_what_is_no_part_is_refused(tmp_path: Path, part: object) -> None:
    step = save(tmp_path, trained())
    with pytest.raises(ConfigError, match="'model'"):
        load_step({"model": part}, step, keys=["model"], manifest=read_manifest(step))


# --- renaming


@pytest.mark.parametrize("rules", [{r"^head\.": "new_head."}, {r"^new_head\.": "head."}])
@pytest.mark.parametrize("with_model", [True, False])
def test_renaming_reaches_the_optimizer_in_either_direction(
    tmp_path: Path, rules: dict[str, str], *, with_model: bool
) -> None:
    saved = trained()
    step = save(tmp_path, saved)
    other = Trainer(seed=2, net=Net(head="new_head"))
    keys = KEYS if with_model else ("optim",)
    report = load(step, other, keys=keys, renaming=Renaming(rules))
    for name, parameter in saved.net.named_parameters():
        other_parameter = dict(other.net.named_parameters())[name.replace("head", "new_head")]
        assert torch.equal(
            saved.optimizer.state[parameter]["exp_avg"], other.optimizer.state[other_parameter]["exp_avg"]
        )
        assert torch.equal(parameter, other_parameter) is with_model
    assert report.keys["optim"].renamed["state.new_head.bias.step"] == "state.head.bias.step"


def test_skipped_names_may_be_reshaped_or_absent(tmp_path: Path) -> None:
    saved = trained()
    step = save(tmp_path, saved)
    reshaped = Trainer(seed=2)
    reshaped.net.head = nn.Linear(6, 9)
    reshaped.optimizer = AdamW(reshaped.net.parameters(), lr=0.1)
    weight = reshaped.net.head.weight.detach().clone()
    report = load(step, reshaped, keys=["model", "optim"], renaming=Renaming(skip=[r"^head\."]))
    assert report.keys["model"].skipped == ("head.weight", "head.bias")
    assert torch.equal(reshaped.net.head.weight, weight)
    assert torch.equal(reshaped.net.body.weight, saved.net.body.weight)
    assert reshaped.net.body.weight in reshaped.optimizer.state
    absent = Trainer(seed=2, net=Net(head="other"))
    report = load(step, absent, keys=["model", "optim"], renaming=Renaming(skip=["other", r"^head\."]))
    assert report.keys["model"].loaded == ("body.weight", "body.bias")
    assert report.keys["optim"].unexpected == ()


def test_renaming_leaves_scheduler_and_trainer_alone(tmp_path: Path) -> None:
    saved = trained()
    fresh = Trainer(seed=2)
    load(save(tmp_path, saved), fresh, renaming=Renaming({"iteration": "x", "last_epoch": "y"}))
    same(fresh.snapshot(), saved.snapshot())


# --- ranks' files, other worlds


def test_case_11_another_number_of_ranks_is_an_error_unless_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = trained()
    step = make_foreign_step(tmp_path, "iter_000000005", saved.states(), rank_state={"position": 9})
    (step / "dataloader/rank_1.pkl").write_bytes((step / "dataloader/rank_0.pkl").read_bytes())
    location = Location(str(step))
    fresh = Trainer(seed=2)
    before = fresh.snapshot()
    with pytest.raises(CheckpointError, match="2 ranks saved it and 1 load it"):
        load(location, fresh)
    same(fresh.snapshot(), before)
    load(location, fresh, on_world_size_change=WorldSizePolicy.SKIP)
    assert fresh.loader.position == 0

    def reshard(states: Mapping[int, object], resize: RankResize) -> object:
        assert (resize.rank, resize.world_size, resize.saved_world_size) == (0, 1, 2)
        return {"position": sum(state["position"] for state in states.values())}  # type: ignore[index]  # a dict

    report = load(location, fresh, on_world_size_change=reshard)
    assert fresh.loader.position == 18
    assert report.states["dataloader"] == {"position": 18}
    # Nobody passes a dataloader: nobody is bothered.
    parts = fresh.parts()
    del parts["dataloader"]
    report = load_step(parts, location, keys=KEYS)
    assert "dataloader" not in report.states


def test_a_key_directory_loads(tmp_path: Path) -> None:
    saved = trained()
    step = make_foreign_step(tmp_path, "iter_000000005", saved.states())
    fresh = Trainer(seed=2)
    location = Location(str(step / "model"))
    report = load_step(fresh.parts(), location, keys=["model"], directories={"model": ""})
    assert isinstance(report.keys["model"], KeyReport)
    assert torch.equal(fresh.net.body.weight, saved.net.body.weight)


class Pipeline:
    """Asks for the names it has, and knows of one that it leaves."""

    def __init__(self) -> None:
        self.got: dict[str, object] = {}

    def state_dict(self) -> dict[str, object]:
        return {}

    def template(self, stored: Mapping[str, StoredValue]) -> dict[str, object]:
        assert stored["a"] == StoredValue(torch.float32, (2,), ("a",), ("a",))
        return {"a": torch.zeros(2), "new": 0}

    def left_out(self, stored: Mapping[str, StoredValue]) -> dict[str, str]:
        return dict.fromkeys(stored.keys() & {"frozen"}, "it is frozen")

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        self.got = dict(state_dict)


def test_what_a_part_leaves_out_is_no_mismatch_and_what_was_not_loaded_is_not_handed_over(tmp_path: Path) -> None:
    step = make_step(tmp_path, 1, {"mine": {"a": torch.ones(2), "frozen": 1}})
    part = Pipeline()
    with pytest.raises(KeyMismatchError) as caught:
        load_step({"mine": part}, step, keys=["mine"], manifest=read_manifest(step))
    assert (caught.value.missing, caught.value.unexpected) == (("mine/new",), ())
    report = load_step({"mine": part}, step, keys=["mine"], manifest=read_manifest(step), strict=False)
    assert list(part.got) == ["a"]
    assert report.keys["mine"].left_out == {"frozen": "it is frozen"}


def test_a_fallback_has_to_bring_what_was_changed(tmp_path: Path) -> None:
    step = make_step(tmp_path, 1, {"mine": {"a": torch.ones(2)}})
    changed = {"mine": {"a", "b"}}
    state: dict[str, object] = {"a": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="mine/b"):
        load_step({"mine": state}, step, keys=["mine"], manifest=read_manifest(step), changed=changed)
    load_step({"mine": state}, step, keys=["mine"], manifest=read_manifest(step), changed={"mine": {"a"}})


def test_a_scheduler_with_functions_loads(tmp_path: Path) -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    optimizer.step()
    scheduler.step()
    step = make_step(tmp_path, 1, {"scheduler": scheduler.state_dict()})
    other = LambdaLR(AdamW([nn.Parameter(torch.ones(1))], lr=1.0), lambda epoch: 0.5**epoch)
    load_step({"scheduler": other}, step, keys=["scheduler"], manifest=read_manifest(step))
    assert other.state_dict() == scheduler.state_dict()


def test_what_nobody_asked_for_can_not_fail_a_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = trained()
    step = make_foreign_step(tmp_path, "iter_000000005", saved.states(), rank_state=object())
    fresh = Trainer(seed=2)
    parts = fresh.parts()
    with pytest.raises(UntrustedDataError):
        load_step(parts, Location(str(step)), keys=KEYS)
    del parts["dataloader"]
    report = load_step(parts, Location(str(step)), keys=KEYS)
    assert "dataloader" not in report.states
    assert "left out" in caplog.text
    assert torch.equal(fresh.net.body.weight, saved.net.body.weight)


def test_case_103_no_checkpoint_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint at .*nothing") as caught:
        load_step({"model": {"w": torch.ones(1)}}, Location(str(tmp_path / "nothing")), keys=["model"])
    assert len(str(caught.value).splitlines()) == 1


def test_case_112_names_that_leave_the_step_are_refused(tmp_path: Path) -> None:
    step = make_foreign_step(tmp_path, "iter_000000005", trained().states())
    path = step / "model/.metadata"
    data = path.read_bytes()
    assert b"__0_0.distcp" in data
    path.write_bytes(data.replace(b"__0_0.distcp", b"../../o.dist"))
    with pytest.raises(UntrustedDataError):
        load_step({"model": Trainer().parts()["model"]}, Location(str(step)), keys=["model"])


def test_case_114_no_secret_is_logged_or_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, trained())
    location = Location(f"file://{tmp_path}", {"auto_mkdir": False, "secret": "s3cr3t"})
    with caplog.at_level(logging.DEBUG), pytest.raises(DcpfsError) as caught:
        load_step({"model": {"w": torch.ones(1)}}, location.join("iter_000000005"), keys=["model"])
    assert "s3cr3t" not in caplog.text + repr(caught.value)
