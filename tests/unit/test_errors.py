"""Every error survives pickling with text, rank and cause, and is the builtin it resembles."""

from __future__ import annotations

import pickle

import pytest

from dcpfs import errors
from dcpfs.errors import CorruptCheckpointError, DcpfsError, KeyMismatchError
from dcpfs.ranks import Ranks, portable_error

KINDS = [getattr(errors, name) for name in errors.__all__]


def chained(kind: type[DcpfsError]) -> DcpfsError:
    try:
        try:
            raise OSError("the original cause")
        except OSError as cause:
            raise kind("Can't read s3://bucket/x: gone.", rank=3) from cause
    except DcpfsError as error:
        return error


@pytest.mark.parametrize("kind", KINDS)
def test_pickling_keeps_kind_text_rank_and_cause(kind: type[DcpfsError]) -> None:
    copy = pickle.loads(pickle.dumps(chained(kind)))
    assert type(copy) is kind
    assert str(copy) == "Can't read s3://bucket/x: gone."
    assert copy.rank == 3
    assert copy.cause_text is not None
    assert "the original cause" in copy.cause_text
    again = pickle.loads(pickle.dumps(copy))
    assert (str(again), again.rank, again.cause_text) == (str(copy), 3, copy.cause_text)


def test_fields_of_an_error_survive_pickling() -> None:
    error = KeyMismatchError("2 keys", missing=["a"], unexpected=["b"], mismatched={"c": "shape"})
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.missing, copy.unexpected, copy.mismatched) == (("a",), ("b",), {"c": "shape"})
    assert str(copy) == "2 keys"
    corrupt = pickle.loads(pickle.dumps(CorruptCheckpointError("bad", file="__0_0.distcp", key="w")))
    assert (corrupt.file, corrupt.key) == ("__0_0.distcp", "w")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.MissingBackendError, ImportError),
        (errors.ObjectNotFoundError, FileNotFoundError),
        (errors.BucketNotFoundError, FileNotFoundError),
        (errors.ObjectExistsError, FileExistsError),
        (errors.PermissionDeniedError, PermissionError),
        (errors.StorageTimeoutError, TimeoutError),
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.CheckpointExistsError, FileExistsError),
        (errors.UntrustedDataError, pickle.UnpicklingError),
        (errors.KeyMismatchError, KeyError),
    ],
)
def test_an_error_is_the_builtin_it_resembles(kind: type[DcpfsError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise kind("x")


def test_cases_54_102_an_unpicklable_exception_travels_as_text() -> None:
    class LocalError(Exception):
        def __init__(self) -> None:
            super().__init__("no luck")
            self.handle = lambda: None

    error = portable_error(LocalError(), rank=2)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, errors.RankError)
    assert "no luck" in str(copy)
    assert copy.rank == 2
    assert "LocalError" in str(copy.cause_text)


def test_alone_a_rank_raises_its_own_error() -> None:
    original = KeyError("x")
    with pytest.raises(KeyError) as caught:
        Ranks().agree(original)
    assert caught.value is original
    assert Ranks().agree_and_gather(None, 7) == [7]
    assert Ranks().scatter([5]) == 5
