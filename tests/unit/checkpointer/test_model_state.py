"""Models: clean names, parts of a pipeline, memory that is filled in place, meta devices, extra states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DataParallel

from dcpfs.checkpointer.model_state import ModelWrapper
from dcpfs.checkpointer.parameter_names import ModuleNames
from dcpfs.checkpointer.stored_value import TemplatePart
from dcpfs.errors import ConfigError, KeyMismatchError
from tests.unit.checkpointer.part_exchange import equal_states, exchange, stored_values, warnings_of


class Net(nn.Module):
    """Blocks, a submodule that is called ``module``, a tied head, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)])
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.module.weight
        self.register_buffer("rope", torch.ones(2), persistent=False)


class ExtraNet(nn.Linear):
    """A layer with an extra state of any kind."""

    def __init__(self, extra: object) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def wrapped(net: Net) -> nn.Module:
    blocks: Any = net.blocks
    blocks[0][0] = checkpoint_wrapper(torch.compile(blocks[0][0]))  # type: ignore[arg-type]
    blocks[1] = torch.compile(checkpoint_wrapper(blocks[1]))
    compiled: Any = torch.compile(net)
    return DataParallel(compiled)


def changed(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, tensor in enumerate((*net.parameters(), *net.buffers())):
            tensor.add_(number + 1)
    return net


def test_names_are_those_of_the_bare_model_through_all_wrappers() -> None:
    bare = Net()
    other = wrapped(copy.deepcopy(bare))
    assert set(ModelWrapper(other).state_dict()) == set(bare.state_dict())
    assert list(ModelWrapper(bare).state_dict()) == list(bare.state_dict())
    assert isinstance(ModelWrapper(bare), TemplatePart)
    assert set(get_model_state_dict(bare)) == set(ModelWrapper(bare).state_dict())


@pytest.mark.parametrize("direction", ["bare to wrapped", "wrapped to bare"])
def test_a_wrapped_model_and_a_bare_one_load_each_other(direction: str) -> None:
    source, target = (changed(Net()), wrapped(Net())) if direction == "bare to wrapped" else (wrapped(Net()), Net())
    outcome = exchange(ModelWrapper(source).state_dict(), ModelWrapper(target))
    assert not outcome.missing
    assert not outcome.unexpected
    assert equal_states(ModelWrapper(source).state_dict(), ModelWrapper(target).state_dict())


def test_a_name_that_a_hook_makes_up_keeps_its_modules_prefix() -> None:
    net = Net()

    def add(module: nn.Module, state: dict[str, object], prefix: str, _: object) -> None:
        state[f"{prefix}made.up"] = torch.ones(1)

    blocks: Any = net.blocks
    blocks[0][0].register_state_dict_post_hook(add)
    names = ModuleNames.of(torch.compile(net))  # type: ignore[arg-type]
    assert names.clean("_orig_mod.blocks.0.0.made.up") == "blocks.0.0.made.up"
    assert "blocks.0.0.made.up" in ModelWrapper(net).state_dict()
    ModelWrapper(net).load_state_dict(ModelWrapper(net).state_dict())  # the module does not take it; that is its own


def test_case_13_the_state_is_asked_for_anew_at_each_call() -> None:
    net = nn.Linear(2, 2)

    def clone(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        state["weight"] = state["weight"].clone()

    net.register_state_dict_post_hook(clone)  # type: ignore[no-untyped-call]
    wrapper = ModelWrapper(net)
    before = wrapper.state_dict()["weight"]
    with torch.no_grad():
        net.weight.add_(1)
    assert not equal_states(before, wrapper.state_dict()["weight"])
    assert equal_states(wrapper.state_dict()["weight"], net.weight)
    target = ModelWrapper(nn.Linear(2, 2))
    exchange(wrapper.state_dict(), target)
    assert equal_states(target.state_dict(), wrapper.state_dict())


def test_what_was_filled_in_place_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    wrapper = ModelWrapper(net)
    template = wrapper.template(stored_values(wrapper.state_dict()))
    copied: list[torch.Tensor] = []
    real = torch.Tensor.copy_

    def noting(self: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self is not source:
            copied.append(self)
        return real(self, source, *rest)

    monkeypatch.setattr(torch.Tensor, "copy_", noting)
    wrapper.load_state_dict(template)
    assert not copied
    wrapper.load_state_dict({name: torch.zeros_like(t) for name, t in net.state_dict().items()})
    assert copied
    assert not net.module.weight.any()


def test_hooks_and_modules_of_the_model_see_the_load() -> None:
    net = Net()
    seen: list[object] = []
    net.register_load_state_dict_pre_hook(lambda *args: seen.append("pre"))  # type: ignore[no-untyped-call]
    net.register_load_state_dict_post_hook(lambda *args: seen.append("post"))  # type: ignore[no-untyped-call]
    exchange(ModelWrapper(net).state_dict(), ModelWrapper(net))
    assert seen == ["pre", "post"]


def test_parts_of_a_pipeline_are_one_state_under_the_names_of_the_whole() -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    del first[1:]
    second[0] = nn.Identity()
    stages = ModelWrapper([first, second])
    assert set(stages.state_dict()) == set(whole.state_dict())
    outcome = exchange(ModelWrapper(changed(whole)).state_dict(), stages)
    assert not outcome.missing
    assert not outcome.unexpected
    assert equal_states(stages.state_dict(), ModelWrapper(whole).state_dict())


def test_parts_may_share_a_tensor_or_an_equal_buffer_and_nothing_else() -> None:
    class Stage(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight
            self.register_buffer("rope", torch.arange(3))

    tied = nn.Parameter(torch.ones(2))
    stages = [Stage(tied), Stage(tied)]
    exchange({"weight": torch.zeros(2), "rope": torch.tensor([5, 6, 7])}, ModelWrapper(stages))
    assert [stage.rope.tolist() for stage in stages] == [[5, 6, 7]] * 2  # type: ignore[operator]
    assert not tied.any()
    with pytest.raises(ConfigError, match="two parts of the model have the name 'weight'"):
        ModelWrapper([Stage(tied), Stage(nn.Parameter(torch.zeros(2)))]).state_dict()
    stages[1].rope.add_(1)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="two parts of the model have the name 'rope'"):
        ModelWrapper(stages).state_dict()


def test_tensors_on_the_meta_device_get_memory_and_stay_the_same_objects(caplog: pytest.LogCaptureFixture) -> None:
    source = changed(Net())
    with torch.device("meta"):
        target = Net()
    target.head.weight = target.module.weight
    tied = target.module.weight
    tied.sharding = "rows"  # type: ignore[attr-defined]  # what a user puts on a parameter
    optimizer = torch.optim.SGD(target.parameters(), lr=1.0)
    outcome = exchange(ModelWrapper(source).state_dict(), ModelWrapper(target))
    assert not outcome.missing
    assert equal_states(ModelWrapper(source).state_dict(), ModelWrapper(target).state_dict())
    assert target.module.weight is tied
    assert target.head.weight is tied
    assert isinstance(tied, nn.Parameter)
    assert tied.requires_grad
    assert tied.sharding == "rows"  # type: ignore[attr-defined]
    assert {id(p) for p in target.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    assert "still on the meta device: rope" in warnings_of(caplog)
    target.module(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_a_tensor_on_meta_that_something_else_holds_is_replaced() -> None:
    import weakref

    with torch.device("meta"):
        net = nn.Linear(2, 2)
    weak = weakref.ref(net.weight)
    exchange(nn.Linear(2, 2).state_dict(), ModelWrapper(net))
    assert not net.weight.is_meta
    assert weak() is not net.weight


def test_what_does_not_fit_stays_on_meta_and_takes_no_memory() -> None:
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    template = ModelWrapper(net).template(stored_values({"weight": torch.zeros(3, 3)}))
    assert all(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in template.values())


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        (3, 4),
        (torch.arange(5, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)),
        (torch.arange(5), None),
        ({"amax": torch.ones(3), "names": ["a", "b"], "deep": {"x": 1}}, {}),
        ({"amax": torch.ones(3)}, {"amax": torch.zeros(3)}),
        ([torch.ones(1), torch.zeros(2)], None),
        (b"bytes", torch.zeros(2)),
        (None, None),
    ],
    ids=str,
)
def test_extra_states_of_any_kind_come_back(saved: object, fresh: object) -> None:
    source, target = nn.Sequential(ExtraNet(saved)), nn.Sequential(ExtraNet(fresh))
    outcome = exchange(ModelWrapper(source).state_dict(), ModelWrapper(target))
    assert not outcome.missing
    assert not outcome.unexpected
    assert isinstance(target[0], ExtraNet)
    assert equal_states(target[0].extra, saved)


def test_unknown_names_are_refused_before_anything_is_changed_and_absent_ones_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = nn.Linear(2, 2)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(KeyMismatchError, match="it has no wieght"):
        ModelWrapper(net).load_state_dict({"wieght": torch.ones(2, 2), "bias": torch.ones(2)})
    assert equal_states(dict(net.state_dict()), dict(before))
    ModelWrapper(net).load_state_dict({"bias": torch.ones(2)})
    assert equal_states(net.bias, torch.ones(2))
    assert "no value for weight: left as it is" in warnings_of(caplog)
    with pytest.raises(KeyMismatchError, match="size mismatch"):
        ModelWrapper(net).load_state_dict({"bias": torch.ones(3)})


@pytest.mark.parametrize("model", [[], None, [1], "text"])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="a model must be a module"):
        ModelWrapper(model)
