"""Choices and settings refuse what they can't mean."""

from __future__ import annotations

import enum
from collections.abc import Callable

import pytest

import dcpfs
from dcpfs.config import CastPolicy, ReplicaReads, RetryConfig, TransferConfig, Trust, VerifyMode
from dcpfs.errors import ConfigError


@pytest.mark.parametrize("kind", [CastPolicy, ReplicaReads, Trust, VerifyMode])
@pytest.mark.parametrize("value", ["everything", None, 3])
def test_an_unknown_choice_is_an_error_that_lists_the_choices(kind: type[enum.Enum], value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(value)
    assert all(repr(member.value) in str(caught.value) for member in kind)
    assert "everything" not in str(caught.value)


@pytest.mark.parametrize("kind", [CastPolicy, ReplicaReads, Trust, VerifyMode])
def test_a_choice_is_made_from_its_text(kind: type[enum.Enum]) -> None:
    assert [kind(member.value) for member in kind] == list(kind)


def test_settings_are_given_or_the_defaults() -> None:
    assert TransferConfig.given(None) == TransferConfig()
    assert RetryConfig.given(None) == RetryConfig()
    own = TransferConfig(concurrency=3)
    assert TransferConfig.given(own) is own


@pytest.mark.parametrize("name", ["transfer", "retry"])
@pytest.mark.parametrize("value", ["hush", 5, {}])
@pytest.mark.parametrize(
    "call",
    [
        lambda **options: dcpfs.save({"x": 1}, "nowhere", **options),
        lambda **options: dcpfs.load({"x": 1}, "nowhere", **options),
        lambda **options: dcpfs.read("nowhere", **options),
        lambda **options: dcpfs.FsspecStorageWriter("nowhere", **options),
        lambda **options: dcpfs.FsspecStorageReader("nowhere", **options),
    ],
    ids=["save", "load", "read", "writer", "reader"],
)
def test_settings_of_another_type_are_refused(call: Callable[..., object], name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"dcpfs\.{name.title()}Config\(") as caught:
        call(**{name: value})
    assert "hush" not in str(caught.value)
