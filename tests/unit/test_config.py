"""Choices and settings refuse what they can't mean."""

from __future__ import annotations

import enum

import pytest

from dcpfs.config import CastPolicy, ReplicaReads, Trust, VerifyMode
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
