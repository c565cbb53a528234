"""A state that goes through a proxy to a store of S3 and back: three parts, and the seed of every value."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dcpfs.testing.tcp_proxy import TcpProxy
from tests.faults.s3_scene import MIB

__all__ = ["MODES", "VALUES", "options_through", "seed_of", "state_of", "template_of"]

VALUES = 11 * MIB // 4
"""11 MiB: three parts."""
MODES = ["disabled", "async", "async_with_pinned_mem"]


def options_through(proxy: TcpProxy, options: Mapping[str, object]) -> dict[str, object]:
    """The options of the server behind a proxy, with the proxy in its place."""
    return {**options, "endpoint_url": f"http://127.0.0.1:{proxy.port}"}


def state_of(seed: int, count: int = VALUES) -> dict[str, object]:
    return {"weights": _weights_of(seed, count), "step": seed}


def template_of(count: int = VALUES) -> dict[str, object]:
    return {"weights": torch.zeros(count), "step": -1}


def seed_of(found: Mapping[str, object]) -> int:
    """The seed of a state that was loaded, after proving that it is all of that one."""
    seed, weights = found["step"], found["weights"]
    assert isinstance(seed, int)
    assert isinstance(weights, torch.Tensor)
    assert torch.equal(weights, _weights_of(seed, len(weights)))
    return seed


def _weights_of(seed: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + seed
