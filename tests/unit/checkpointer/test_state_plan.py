"""What a save gets of the states and the metric that a training loop passes."""

from __future__ import annotations

import logging
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from dcpfs.checkpointer.config import CheckpointConfig
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.manifest import Manifest, decode_manifest, encode_manifest
from dcpfs.checkpointer.state_plan import plan_states
from dcpfs.errors import ConfigError


def plan(metric: object) -> LocalStep:
    config = CheckpointConfig(save_dir="memory://state-plan")
    return plan_states({}, 3, config, world_size=1, rank=0, file_rank=None, metric=metric)  # type: ignore[arg-type]  # what a caller may pass all the same


@pytest.mark.parametrize(
    "metric",
    [0.5, 2, np.float32(0.25), np.int64(3), torch.tensor(0.5), torch.tensor([4]), Decimal("0.5"), Fraction(1, 2)],
)
def test_metric_of_any_library_becomes_a_float(metric: object) -> None:
    rated = plan(metric).metric
    assert type(rated) is float
    assert decode_manifest(encode_manifest(Manifest("id", 3, 1, {}, metric=rated)), url="u").metric == rated


@pytest.mark.parametrize(
    "metric", [float("nan"), float("inf"), -float("inf"), torch.tensor(float("nan")), np.float32("inf")]
)
def test_metric_that_is_not_finite_counts_as_none(metric: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert plan(metric).metric is None
    assert "iteration 3" in caplog.text


@pytest.mark.parametrize("metric", ["0.5", True, b"1", torch.ones(2), [0.5], 1j, object(), 10**400])
def test_metric_that_is_no_number_is_refused(metric: object) -> None:
    with pytest.raises(ConfigError, match="iteration 3"):
        plan(metric)


def test_manifest_that_could_not_be_read_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_manifest(Manifest("id", 3, 1, {}, metric=float("nan")))
