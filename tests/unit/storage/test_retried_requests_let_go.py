"""Case 62: what a request was run with is freed when it has ended, and not when the collector comes to it."""

from __future__ import annotations

import weakref

import pytest

from dcpfs.config import RetryConfig
from dcpfs.errors import StorageError
from dcpfs.storage.retrying import RetryPolicy
from dcpfs.storage.translate import ResponseError


class State:
    """What whoever asks holds: a whole training state, maybe."""


def run(code: int, name: str, times: int) -> tuple[bool, weakref.ref[State]]:
    """Whether a request succeeds that fails so often, and what it was run with."""
    state, calls = State(), 0

    def operation() -> State:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise ResponseError(code, name)
        return state

    policy = RetryPolicy(RetryConfig(attempts=5), sleep=lambda _: None)
    try:
        found = policy.run(operation, verb="read", target="t", refresh=lambda: state)
    except StorageError:
        return False, weakref.ref(state)
    return found is state, weakref.ref(state)


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize(
    ("code", "name", "times", "succeeds"),
    [
        pytest.param(503, "SlowDown", 0, True, id="never failed"),
        pytest.param(404, "NoSuchKey", 1, False, id="nothing there"),
        pytest.param(503, "SlowDown", 1, True, id="repeated once"),
        pytest.param(503, "SlowDown", 4, True, id="repeated"),
        pytest.param(503, "SlowDown", 9, False, id="given up"),
        pytest.param(400, "ExpiredToken", 1, True, id="renewed"),
        pytest.param(400, "ExpiredToken", 9, False, id="renewed in vain"),
    ],
)
def test_case_62_a_request_that_has_ended_holds_nothing(code: int, name: str, times: int, succeeds: bool) -> None:
    succeeded, held = run(code, name, times)
    assert succeeded is succeeds
    assert held() is None
