"""A missing object is an answer; a missing bucket is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest

from dcpfs.checkpointer.layout import WRITING_NAME, step_name
from dcpfs.checkpointer.ownership import read_owner
from dcpfs.checkpointer.presence import get_if_there, size_if_there
from dcpfs.errors import BucketNotFoundError
from dcpfs.storage.store import Store
from tests.unit.dcp.memory_store import MemoryStore

PATH = f"{step_name(1)}/{WRITING_NAME}"

ASKED: list[tuple[Callable[[Store], object], object]] = [
    (lambda store: get_if_there(store, PATH), b"me\n"),
    (lambda store: size_if_there(store, PATH), 3),
    (lambda store: read_owner(store, 1), "me"),
]


class NoBucket(MemoryStore):
    """The bucket was deleted, or never made."""

    def get(self, path: str) -> NoReturn:
        raise BucketNotFoundError("Can't read: NoSuchBucket")

    def head(self, path: str) -> NoReturn:
        raise BucketNotFoundError("Can't look up: NoSuchBucket")


@pytest.mark.parametrize(("ask", "answer"), ASKED, ids=["object", "size", "owner of a step"])
def test_what_is_not_there_is_none_and_a_bucket_that_is_not_there_an_error(
    ask: Callable[[Store], object], answer: object
) -> None:
    store = MemoryStore()
    assert ask(store) is None
    store.objects[PATH] = b"me\n"
    assert ask(store) == answer
    with pytest.raises(BucketNotFoundError):
        ask(NoBucket())
