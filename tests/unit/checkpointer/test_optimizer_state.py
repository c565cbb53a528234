"""Optimizers: torch's names, all moments into any fresh optimizer, groups, frozen and tied parameters, containers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from dcpfs.checkpointer.optimizer_keys import sort_keys
from dcpfs.checkpointer.optimizer_state import OptimizersWrapper
from dcpfs.checkpointer.stored_value import StoredValue, TemplatePart
from dcpfs.errors import ConfigError, KeyMismatchError, UnsupportedValueError
from tests.unit.checkpointer.part_exchange import equal_states, exchange, stored_values, warnings_of

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-foreach-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False, amsgrad=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def make_net(seed: int = 0) -> Any:  # a Sequential, whose items have no types
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(net: nn.Module, optimizers: Optimizer | Iterable[Optimizer], steps: int = 2, seed: int = 1) -> None:
    every = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    torch.manual_seed(seed)
    for _ in range(steps):
        net(torch.randn(5, 3)).square().sum().backward()
        for optimizer in every:
            optimizer.step()
            optimizer.zero_grad()


def add_gradients(net: nn.Module) -> None:
    net(torch.ones(1, 3)).sum().backward()


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_keys_and_values_are_those_of_torch(name: str) -> None:
    net = make_net()
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    train(net, optimizer)
    ours = OptimizersWrapper(net, optimizer).state_dict()
    theirs = get_optimizer_state_dict(net, optimizer, options=FLAT)
    assert list(ours) == list(theirs)
    assert equal_states(ours, theirs)


@pytest.mark.parametrize("fresh", ["fresh", "gradients there", "stepped once", "part stepped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_cases_5_6_everything_comes_back_whatever_the_optimizer_holds_now(name: str, fresh: str) -> None:
    net = make_net()
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    train(net, optimizer)
    target = copy.deepcopy(net)
    other = OPTIMIZERS[name](list(target.parameters()))
    if fresh == "stepped once":
        train(copy.deepcopy(target), other, 0)
        add_gradients(target)
        other.step()
        with torch.no_grad():
            for parameter, value in zip(target.parameters(), net.parameters(), strict=True):
                parameter.copy_(value)
    elif fresh == "part stepped":
        first = next(target.parameters())
        first.grad = torch.ones_like(first)
        other.step()
        with torch.no_grad():
            first.copy_(next(net.parameters()))
    if fresh == "gradients there":
        add_gradients(target)
    outcome = exchange(OptimizersWrapper(net, optimizer).state_dict(), OptimizersWrapper(target, other))
    assert not outcome.unexpected
    assert not outcome.left_out
    assert equal_states(state_of(optimizer), state_of(other))
    other.zero_grad()
    train(net, optimizer, seed=2)
    train(target, other, seed=2)
    assert equal_states(dict(net.state_dict()), dict(target.state_dict()))


def test_asking_for_the_state_changes_nothing() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    wrapper = OptimizersWrapper(net, optimizer)
    assert isinstance(wrapper, TemplatePart)
    assert not [key for key in wrapper.state_dict() if key.startswith("state.")]
    assert not optimizer.state
    add_gradients(net)
    assert wrapper.state_dict()["param_groups.0.weight.lr"] == 1e-3
    assert not optimizer.state


def test_case_7_state_of_frozen_and_of_never_stepped_parameters_is_kept_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    net[1].weight.requires_grad_(False)  # never trained
    train(net, optimizer)
    net[0].bias.requires_grad_(False)  # trained, then frozen
    state = OptimizersWrapper(net, optimizer).state_dict()
    assert "state.0.bias.exp_avg" in state
    assert "state.1.weight.exp_avg" not in state
    target = make_net()
    target[0].bias.requires_grad_(False)
    other = torch.optim.AdamW(target.parameters())
    add_gradients(target)
    other.step()  # also the one that should have no state
    outcome = exchange(state, OptimizersWrapper(target, other))
    assert not outcome.unexpected
    assert equal_states(state_of(optimizer), state_of(other))
    assert "no gradient had reached 1.weight when the optimizer was saved" in warnings_of(caplog)


def test_partial_training_then_full_training_and_back(caplog: pytest.LogCaptureFixture) -> None:
    """A LoRA-like run: the optimizer holds few of the parameters; later all; then few again."""
    net = make_net()
    few = torch.optim.AdamW(list(net[1].parameters()), lr=0.5)
    train(net, few)
    every = torch.optim.AdamW(net.parameters())
    outcome = exchange(OptimizersWrapper(net, few).state_dict(), OptimizersWrapper(net, every))
    assert not outcome.unexpected
    assert "no optimizer state was saved for 0.weight, 0.bias: they start afresh" in warnings_of(caplog)
    assert every.param_groups[0]["lr"] == 0.5
    assert len(every.state) == 2
    train(net, every)
    again = torch.optim.AdamW(list(net[1].parameters()))
    state = OptimizersWrapper(net, every).state_dict()
    outcome = exchange(state, OptimizersWrapper(net, again))
    assert not outcome.unexpected
    assert set(outcome.left_out) == {key for key in state if ".0.weight." in key or ".0.bias." in key}
    assert "no optimizer holds 0.weight: it is frozen now" in outcome.left_out["state.0.weight.exp_avg"]
    assert equal_states(again.state[net[1].weight], every.state[net[1].weight])


def test_state_of_a_parameter_that_the_model_lacks_is_a_mismatch_not_a_warning() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    state = {key.replace("0.weight", "renamed"): value for key, value in
             OptimizersWrapper(net, optimizer).state_dict().items()}  # fmt: skip
    outcome = exchange(state, OptimizersWrapper(net, torch.optim.AdamW(net.parameters())))
    assert outcome.unexpected == {key for key in state if ".renamed." in key}


def test_several_optimizers_over_parts_of_a_pipeline_load_into_one_and_back() -> None:
    whole = make_net()
    stages = [copy.deepcopy(whole), copy.deepcopy(whole)]
    del stages[0][1:]
    stages[1][0] = nn.Identity()
    optimizers = [torch.optim.AdamW(stages[0].parameters(), lr=0.1), torch.optim.AdamW(stages[1].parameters(), lr=0.1)]
    for _ in range(2):
        stages[1](stages[0](torch.ones(2, 3))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    split = OptimizersWrapper(stages, optimizers)
    one = torch.optim.AdamW(whole.parameters(), lr=0.3)
    assert not exchange(split.state_dict(), OptimizersWrapper(whole, one)).unexpected
    assert equal_states(OptimizersWrapper(whole, one).state_dict(), dict(sorted_like(split.state_dict(), one, whole)))
    back = [torch.optim.AdamW(stages[0].parameters()), torch.optim.AdamW(stages[1].parameters())]
    assert not exchange(OptimizersWrapper(whole, one).state_dict(), OptimizersWrapper(stages, back)).unexpected
    assert equal_states([state_of(each) for each in back], [state_of(each) for each in optimizers])
    # one stage alone: the other's keys are another rank's to ask for
    alone = OptimizersWrapper(stages[0], torch.optim.AdamW(stages[0].parameters()))
    assert exchange(split.state_dict(), alone).unexpected == {key for key in split.state_dict() if ".1." in key[:20]}


def sorted_like(state: dict[str, object], optimizer: Optimizer, net: nn.Module) -> Iterator[tuple[str, object]]:
    for key in OptimizersWrapper(net, optimizer).state_dict():
        yield key, state[key]


def test_other_groups_and_another_order_are_no_matter() -> None:
    net = make_net()
    weights, biases = [net[0].weight, net[1].weight], [net[0].bias, net[1].bias]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}], lr=0.1
    )
    train(net, optimizer)
    other = torch.optim.AdamW([{"params": reversed(biases)}, {"params": weights[:1]}, {"params": weights[1:]}])
    exchange(OptimizersWrapper(net, optimizer).state_dict(), OptimizersWrapper(net, other))
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.5, 0.5]
    assert all(equal_states(optimizer.state[p], other.state[p]) for p in net.parameters())
    merged = torch.optim.AdamW(net.parameters(), lr=0.7)
    with pytest.raises(KeyMismatchError, match=r"in one group, but were saved with weight_decay 0\.5 and 0\.0"):
        exchange(OptimizersWrapper(net, optimizer).state_dict(), OptimizersWrapper(net, merged))
    assert not merged.state
    assert merged.param_groups[0]["lr"] == 0.7


def test_case_95_extra_fields_of_a_group_are_kept() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, betas=(0.8, 0.95))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    optimizer.param_groups[0]["owner"] = {"name": "trunk", "decay": [1, 2]}
    train(net, optimizer)
    other = torch.optim.AdamW(net.parameters())
    exchange(OptimizersWrapper(net, optimizer).state_dict(), OptimizersWrapper(net, other))
    group = other.param_groups[0]
    assert group["initial_lr"] == 0.1
    assert group["betas"] == (0.8, 0.95)
    assert group["foreach"] is None
    assert group["owner"] == {"name": "trunk", "decay": [1, 2]}
    torch.optim.lr_scheduler.LambdaLR(other, lambda step: 0.5, last_epoch=3)  # needs initial_lr


def test_a_field_that_only_this_torch_has_keeps_its_value() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer)
    state = {key: value for key, value in OptimizersWrapper(net, optimizer).state_dict().items()
             if not key.endswith(".capturable")}  # fmt: skip
    other = torch.optim.AdamW(net.parameters())
    assert not exchange(state, OptimizersWrapper(net, other)).missing
    assert other.param_groups[0]["capturable"] is False


def test_names_that_a_group_carries_are_one_a_parameter() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.named_parameters())
    train(net, optimizer)
    state = OptimizersWrapper(net, optimizer).state_dict()
    assert state["param_groups.0.weight.param_names"] == ["0.weight"]
    other = torch.optim.AdamW(net.named_parameters())
    exchange(state, OptimizersWrapper(net, other))
    assert other.param_groups[0]["param_names"] == [name for name, _ in net.named_parameters()]
    theirs = get_optimizer_state_dict(net, optimizer, options=FLAT)
    plain = torch.optim.AdamW(net.parameters())
    exchange(theirs, OptimizersWrapper(net, plain))
    assert "param_names" not in plain.param_groups[0]
    assert equal_states(plain.state[net[0].weight], optimizer.state[net[0].weight])


def test_moments_come_back_in_the_type_that_was_saved() -> None:
    """torch's own load_state_dict casts them to the parameter's type."""
    net = make_net().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.rand(parameter.shape),
            "deep": {"exp": torch.rand(parameter.shape)},
        }
    other = torch.optim.AdamW(net.parameters())
    exchange(OptimizersWrapper(net, optimizer).state_dict(), OptimizersWrapper(net, other))
    for parameter in net.parameters():
        assert equal_states(dict(other.state[parameter]), dict(optimizer.state[parameter]))
        assert other.state[parameter]["exp_avg"].dtype is torch.float32


def test_a_tied_weight_has_one_state_under_its_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self, *, head_first: bool) -> None:
            super().__init__()
            layers = {"embedding": nn.Linear(3, 3), "head": nn.Linear(3, 3, bias=False)}
            layers["head"].weight = layers["embedding"].weight
            for name in ("head", "embedding") if head_first else ("embedding", "head"):
                self.add_module(name, layers[name])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x))  # type: ignore[operator,no-any-return]

    net = Tied(head_first=False)
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    state = OptimizersWrapper(net, optimizer).state_dict()
    assert "state.embedding.weight.exp_avg" in state
    assert not [key for key in state if ".head." in key]
    target = Tied(head_first=True)
    other = torch.optim.AdamW(target.parameters())
    assert not exchange(state, OptimizersWrapper(target, other)).unexpected
    weight: Any = target.get_parameter("head.weight")
    assert equal_states(other.state[weight], optimizer.state[net.get_parameter("head.weight")])
    untied = {**state, **{key.replace("embedding", "head"): value for key, value in state.items()
                          if "embedding.weight" in key}}  # fmt: skip
    outcome = exchange(untied, OptimizersWrapper(net, torch.optim.AdamW(net.parameters())))
    assert not outcome.unexpected
    assert "head.weight is tied to embedding.weight" in outcome.left_out["state.head.weight.step"]


def test_names_are_clean_under_wrappers() -> None:
    net = make_net()
    compiled: Any = nn.DataParallel(torch.compile(net))
    optimizer = torch.optim.AdamW(compiled.parameters())
    train(net, optimizer)
    plain = torch.optim.AdamW(net.parameters())
    assert not exchange(OptimizersWrapper(compiled, optimizer).state_dict(), OptimizersWrapper(net, plain)).unexpected
    assert equal_states(state_of(plain), state_of(optimizer))


def test_lists_of_tensors_and_whole_values_come_back() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(net.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    other = torch.optim.LBFGS(net.parameters())
    exchange(OptimizersWrapper(net, optimizer).state_dict(), OptimizersWrapper(net, other))
    assert equal_states(state_of(optimizer), state_of(other))


def test_a_moment_of_another_shape_is_shown_as_it_would_be_needed_and_not_taken_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    state = OptimizersWrapper(net, optimizer).state_dict()
    stored = stored_values(state)
    stored["state.0.weight.exp_avg"] = StoredValue(torch.float32, (5, 5))
    other = torch.optim.AdamW(net.parameters())
    wrapper = OptimizersWrapper(net, other)
    template = wrapper.template(stored)
    shown = template.pop("state.0.weight.exp_avg")
    assert isinstance(shown, torch.Tensor)
    assert shown.shape == net[0].weight.shape
    wrapper.load_state_dict(template)  # a lenient load leaves the key out
    assert net[0].weight not in other.state
    assert net[0].bias in other.state
    assert "0.weight was saved in another shape: they start afresh" in warnings_of(caplog)


def test_what_a_load_was_asked_to_skip_keeps_its_state() -> None:
    net = make_net()
    saved, live = torch.optim.AdamW(net.parameters()), torch.optim.AdamW(net.parameters())
    train(net, [saved])
    train(net, [live])
    before = copy.deepcopy(live.state[net[0].weight])
    wrapper = OptimizersWrapper(net, live)
    template = wrapper.template(stored_values(OptimizersWrapper(net, saved).state_dict()))
    wrapper.load_state_dict({key: value for key, value in template.items() if ".0.weight." not in key})
    assert equal_states(live.state[net[0].weight], before)


def test_case_14_the_learning_rate_is_read_at_each_save() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrapper = OptimizersWrapper(net, optimizer)
    before = wrapper.state_dict()["param_groups.0.weight.lr"]
    train(net, optimizer, 1)
    scheduler.step()
    assert wrapper.state_dict()["param_groups.0.weight.lr"] == scheduler.get_last_lr()[0] != before


def test_case_20_a_second_generation_equals_the_first() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    first = OptimizersWrapper(net, optimizer).state_dict()
    states = [first]
    for _ in range(2):
        other = torch.optim.AdamW(net.parameters())
        wrapper = OptimizersWrapper(net, other)
        exchange(states[-1], wrapper)
        states.append(wrapper.state_dict())
    assert equal_states(states[2], first)
    assert list(states[2]) == list(first)


class Container:
    """What a trainer may have: optimizers behind torch's functions (Optimizers of several model parts)."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.optimizers = [torch.optim.AdamW(net.parameters())]

    def state_dict(self) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.net, self.optimizers[0], options=FLAT))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.net, self.optimizers[0], optim_state_dict=state_dict, options=FLAT)


def test_case_6_a_container_of_the_trainers_own_is_passed_through_also_with_gradients_there() -> None:
    net = make_net()
    source = Container(net)
    train(net, source.optimizers)
    wrapper = OptimizersWrapper(net, source)
    state = wrapper.state_dict()
    assert equal_states(state, source.state_dict())
    target = Container(net)
    add_gradients(net)
    gradient = net[0].weight.grad
    outcome = exchange(state, OptimizersWrapper([], target))
    assert not outcome.unexpected
    assert not outcome.missing
    assert equal_states(target.state_dict(), state)
    assert net[0].weight.grad is gradient


def test_a_container_beside_optimizers() -> None:
    net, other = make_net(), nn.Linear(2, 2)
    source, plain = Container(net), torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    train(net, source.optimizers)
    other(torch.ones(1, 2)).sum().backward()
    plain.step()
    both = OptimizersWrapper(other, [plain, source])
    assert set(both.state_dict()) == set(source.state_dict()) | set(OptimizersWrapper(other, plain).state_dict())
    target, fresh = Container(net), torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.9)
    exchange(both.state_dict(), OptimizersWrapper(other, [fresh, target]))
    assert equal_states(target.state_dict(), source.state_dict())
    assert equal_states(state_of(fresh), state_of(plain))
    with pytest.raises(ConfigError, match="two optimizers have a state under the key"):
        OptimizersWrapper(net, [source.optimizers[0], Container(net)]).state_dict()


def test_wrong_use_is_told_by_name() -> None:
    net = make_net()
    with pytest.raises(ConfigError, match=r"a Linear has not|a Sequential has not"):
        OptimizersWrapper(net, net)
    with pytest.raises(ConfigError, match="a int has not"):
        OptimizersWrapper(net, [3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="a model must be"):
        OptimizersWrapper([], torch.optim.SGD(net.parameters()))
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(ConfigError, match="given twice"):
        OptimizersWrapper(net, [optimizer, optimizer])
    with pytest.raises(ConfigError, match=r"two optimizers or groups hold '0\.weight'"):
        OptimizersWrapper(net, [optimizer, torch.optim.SGD(net.parameters())]).state_dict()
    with pytest.raises(ConfigError, match=r"holds a parameter of shape \(3, 4\) that the model lacks"):
        OptimizersWrapper(net, torch.optim.SGD(nn.Linear(4, 3).parameters())).state_dict()
    optimizer.state["global"] = {"k": 1}  # type: ignore[index]  # what some optimizers do
    with pytest.raises(UnsupportedValueError, match="state under 'global', which belongs to no parameter"):
        OptimizersWrapper(net, optimizer).state_dict()


def test_keys_are_sorted_by_the_longest_name_that_is_known() -> None:
    keys = ["state.a.b.exp_avg", "state.a.step", "param_groups.a.b.c.lr", "state.x.step", "other", "state.a"]
    found, rest = sort_keys(keys, {"a", "a.b", "a.b.c"})
    assert {name: (each.state, each.group) for name, each in found.items()} == {
        "a.b": ({"exp_avg": "state.a.b.exp_avg"}, {}),
        "a": ({"step": "state.a.step"}, {}),
        "a.b.c": ({}, {"lr": "param_groups.a.b.c.lr"}),
    }
    assert rest == ["state.x.step", "other", "state.a"]
