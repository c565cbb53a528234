"""File names of a checkpoint, and which names a checkpoint may name.

Problem: torch joins the file names that stand in ``.metadata`` to the checkpoint's base path unchecked, so an edited
``../other/__0_0.distcp`` loads tensors from another directory, and a URL from another host (case 112).

Way taken: one function makes each kind of name, one takes it apart, and every name that is read from a checkpoint
passes `check_relative_name` before anything is opened. The check is on the text alone and the same on all systems:
what would be a way out on Windows (``C:x``, a backslash), in a chained URL (``::``) or for a scheme (``s3:``) is
refused everywhere.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dcpfs.errors import UntrustedDataError

__all__ = [
    "DATA_SUFFIX",
    "METADATA_NAME",
    "DataFileName",
    "check_relative_name",
    "data_file_name",
    "parse_data_file_name",
    "parse_rank_metadata_name",
    "rank_metadata_name",
]

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"

_DATA_FILE = re.compile(r"__(0|[1-9][0-9]{0,17})_(0|[1-9][0-9]{0,17})\.distcp", re.ASCII)
_RANK_METADATA = re.compile(r"__(0|[1-9][0-9]{0,17})\.metadata", re.ASCII)
_FORBIDDEN = re.compile(r"[\\\x00\ud800-\udfff]|::|^[A-Za-z][A-Za-z0-9+.\-]*:")
_LONGEST_NAME = 4096


class DataFileName(NamedTuple):
    """The rank that wrote a data file, and its number among that rank's files."""

    rank: int
    number: int


def data_file_name(rank: int, number: int) -> str:
    """Name of the ``number``-th data file of a rank, as torch's writer counts them."""
    return f"__{rank}_{number}{DATA_SUFFIX}"


def parse_data_file_name(name: str) -> DataFileName | None:
    """Rank and number of a data file, or None when the name is not one that `data_file_name` makes."""
    match = _DATA_FILE.fullmatch(name)
    return None if match is None else DataFileName(int(match[1]), int(match[2]))


def rank_metadata_name(rank: int) -> str:
    """Name of the metadata that one rank writes by itself when a save runs without collectives."""
    return f"__{rank}{METADATA_NAME}"


def parse_rank_metadata_name(name: str) -> int | None:
    """Rank of a per-rank metadata file, or None when the name is not one."""
    match = _RANK_METADATA.fullmatch(name)
    return None if match is None else int(match[1])


def check_relative_name(name: object) -> str:
    """Return the name when it stays inside the checkpoint, whatever filesystem it is joined to.

    Plain subdirectories are allowed. Names are data of the checkpoint, not of the user, and stand quoted and shortened
    in the error.

    Raises:
        UntrustedDataError: Not a string, empty, absolute, with an empty, ``.`` or ``..`` segment, a backslash, NUL,
            half a surrogate pair, a drive letter, a URL scheme or ``::``.
    """
    if type(name) is not str:
        raise UntrustedDataError(
            f"reading the checkpoint's metadata: a file name is a {type(name).__name__}, not a string; refused, since "
            f"the metadata was edited or is damaged"
        )
    if (
        not name
        or len(name) > _LONGEST_NAME
        or _FORBIDDEN.search(name) is not None
        or any(segment in ("", ".", "..") for segment in name.split("/"))
    ):
        raise UntrustedDataError(
            f"reading the checkpoint's metadata: the file name {name[:200]!r} would leave the checkpoint; refused, "
            f"since the metadata was edited or is damaged"
        )
    return name
