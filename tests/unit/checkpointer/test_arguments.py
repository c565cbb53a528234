"""Arguments that stand where another one is meant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dcpfs.checkpointer.arguments import check_arguments
from dcpfs.errors import ConfigError

NET = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(NET.parameters(), lr=0.1)
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)
SCALER = torch.amp.GradScaler("cpu")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"scheduler": 1},
            "scheduler was given a value of type int, which seems to be meant for iteration: .*iteration=...",
        ),
        ({"grad_scaler": 100}, "grad_scaler was given a value of type int, which seems to be meant for iteration"),
        ({"optimizer": SCHEDULER}, "optimizer was given a value of type StepLR, which seems to be meant for scheduler"),
        ({"scheduler": [OPTIMIZER]}, "scheduler was given a value of type list, which seems to be meant for optimizer"),
        (
            {"model_parts": OPTIMIZER},
            "model_parts was given a value of type SGD, which seems to be meant for optimizer",
        ),
        ({"optimizer": NET}, "optimizer was given a value of type Linear, which seems to be meant for model_parts"),
        (
            {"scheduler": SCALER},
            "scheduler was given a value of type GradScaler, which seems to be meant for grad_scaler",
        ),
        ({"iteration": SCHEDULER}, "model_parts, optimizer, scheduler, grad_scaler, iteration$"),
    ],
)
def test_what_stands_in_the_place_of_something_else_is_named(given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_arguments(given)


def test_what_is_right_or_of_no_known_kind_passes() -> None:
    check_arguments(
        {
            "model_parts": (NET, NET),
            "optimizer": [OPTIMIZER],
            "scheduler": SCHEDULER,
            "grad_scaler": SCALER,
            "iteration": 5,
        }
    )
    check_arguments({"model_parts": None, "optimizer": object(), "scheduler": [], "grad_scaler": True})
