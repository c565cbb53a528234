from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.errors import UntrustedDataError
from dcpfs.format.names import (
    DataFileName,
    check_relative_name,
    data_file_name,
    parse_data_file_name,
    parse_rank_metadata_name,
    rank_metadata_name,
)


@given(st.integers(0, 10**17), st.integers(0, 10**17))
def test_names_of_data_files_are_read_as_they_are_made(rank: int, number: int) -> None:
    assert parse_data_file_name(data_file_name(rank, number)) == DataFileName(rank, number)
    assert parse_rank_metadata_name(rank_metadata_name(rank)) == rank
    assert check_relative_name(data_file_name(rank, number)) == data_file_name(rank, number)


@pytest.mark.parametrize(
    "name",
    [
        "__0_0.distcp.tmp",
        "__00_0.distcp",
        "__-1_0.distcp",
        "__0_0",
        "a/__0_0.distcp",
        "__0_0.distcp\n",
        "__٣_0.distcp",
        "",
    ],
)
def test_other_names_are_no_data_files(name: str) -> None:
    assert parse_data_file_name(name) is None


@pytest.mark.parametrize("name", [".metadata", "__.metadata", "__0_0.metadata", "__0.metadata/", "__01.metadata"])
def test_other_names_are_no_rank_metadata(name: str) -> None:
    assert parse_rank_metadata_name(name) is None


@pytest.mark.parametrize("name", ["__0_0.distcp", "sub/dir/file", "...", "a..b", ".hidden", "with space", "ünïcode"])
def test_names_inside_the_checkpoint_pass(name: str) -> None:
    assert check_relative_name(name) is name


@pytest.mark.parametrize(
    "name",
    [
        "", "/etc/passwd", "../other/__0_0.distcp", "a/../../b", "a/..", ".", "./a", "a/./b", "a//b", "a/", "..\\b",
        "a\\b",
        "C:x", "C:/x", "s3://bucket/x", "s3:x", "file:x", "simplecache::s3://b/x", "a::b", "a\0b", "\0", "x" * 5000,
        "a\ud800", None, 3, b"__0_0.distcp", ("a",),
    ],
)  # fmt: skip
def test_case_112_names_that_leave_the_checkpoint_are_refused(name: object) -> None:
    with pytest.raises(UntrustedDataError, match="refused"):
        check_relative_name(name)


@given(st.text())
def test_a_name_that_passes_stays_inside_whatever_it_is_joined_to(name: str) -> None:
    try:
        check_relative_name(name)
    except UntrustedDataError:
        return
    assert name
    assert not name.startswith("/")
    assert "\\" not in name
    assert "://" not in name.partition("/")[0] + "/"
    assert not {"", ".", ".."} & set(name.split("/"))
