"""Keys of the user's own come back whole, whatever their holder has by then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import dcpfs
from dcpfs.checkpointer.layout import check_iteration, step_name


class Average:
    """Has nothing before the first update, as averages of parameters have."""

    def __init__(self, shadow: Mapping[str, torch.Tensor] | None = None) -> None:
        self.shadow = dict(shadow or {})

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.shadow), "count": len(self.shadow)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.shadow = dict(state_dict["shadow"])


def test_an_empty_holder_takes_all_that_was_saved() -> None:
    config = dcpfs.CheckpointConfig(save_dir="memory://whole-state", extra_keys=["ema", "history"])
    shadow = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        checkpointer.save_state(3, {"ema": Average(shadow), "history": {"losses": [1.5, 2.5], "mask": torch.ones(2)}})
        average, history = Average(), dict[str, Any]()
        assert checkpointer.load_state({"ema": average, "history": history}) == 3
    assert average.shadow.keys() == shadow.keys()
    assert all(torch.equal(average.shadow[name], value) for name, value in shadow.items())
    assert history["losses"] == [1.5, 2.5]
    assert torch.equal(history["mask"], torch.ones(2))


def test_what_a_holder_has_and_the_checkpoint_lacks_is_an_error() -> None:
    config = dcpfs.CheckpointConfig(save_dir="memory://whole-state-missing", extra_keys=["ema"])
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        checkpointer.save_state(1, {"ema": Average({"weight": torch.ones(2)})})
        with pytest.raises(dcpfs.KeyMismatchError, match=r"shadow\.other"):
            checkpointer.load_state({"ema": Average({"other": torch.ones(2)})})


@pytest.mark.parametrize("number", [np.int64(7), np.uint8(7), torch.tensor(7), 7])
def test_iterations_of_any_integer_type_name_a_step(number: object) -> None:
    assert step_name(number) == "iter_000000007"
    assert type(check_iteration(number)) is int


@pytest.mark.parametrize("number", [True, -1, 10**18, 1.0, "7", None, np.float32(7), np.array([7])])
def test_what_is_no_iteration_is_refused(number: object) -> None:
    with pytest.raises(dcpfs.ConfigError, match="can't name a step"):
        check_iteration(number)
