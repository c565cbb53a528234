"""What a file of a step is, by its name. Pure.

Problem: who withdraws, abandons or removes a step has to know which files dcpfs made there, and which of them are
markers that go first. Each with a list of its own, one of them one day deletes what is the user's.

Way taken: one place says it. Names are relative to the step: a file lies right in the step, or right in a directory
that can be a key's.
"""

from __future__ import annotations

from dcpfs.checkpointer.layout import MANIFEST_NAME, WRITING_NAME, check_key, parse_rank_file_name
from dcpfs.errors import ConfigError
from dcpfs.format.names import METADATA_NAME, parse_data_file_name, parse_rank_metadata_name

__all__ = ["is_data_file", "is_key", "is_metadata_file", "is_own_file", "is_rank_file"]


def is_key(name: str) -> bool:
    """Whether a directory of that name can be a key's."""
    try:
        check_key(name)
    except ConfigError:
        return False
    return True


def is_metadata_file(name: str) -> bool:
    """Whether it is a key's marker: its metadata, or what one of its ranks wrote by itself."""
    file = _file_of_key(name)
    return file == METADATA_NAME or parse_rank_metadata_name(file) is not None


def is_data_file(name: str) -> bool:
    """Whether it holds a rank's tensors and values of a key."""
    return parse_data_file_name(_file_of_key(name)) is not None


def is_rank_file(name: str) -> bool:
    """Whether it is what belongs to one rank."""
    return parse_rank_file_name(_file_of_key(name)) is not None


def is_own_file(name: str) -> bool:
    """Whether dcpfs makes such a file. ``.protected`` is the user's."""
    return name in (MANIFEST_NAME, WRITING_NAME) or is_metadata_file(name) or is_data_file(name) or is_rank_file(name)


def _file_of_key(name: str) -> str:
    """The file's name when it lies right in a key's directory, else ""."""
    key, _, file = name.partition("/")
    return file if is_key(key) else ""
