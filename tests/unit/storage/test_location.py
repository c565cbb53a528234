"""Locations: what a URL means, what a name is, what is refused, and what is never shown."""

from __future__ import annotations

import copy
import os
import pickle
import re
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.errors import ConfigError
from dcpfs.storage.location import Location, check_name, redact_text

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)
PLAIN_BASES = [
    "s3://bucket",
    "s3://bucket/a b/x?y#z",
    "gs://bucket/run",
    "abfs://container@account.dfs.core.windows.net/x",
    "memory://",
    "memory://a",
    "/data/run",
    "sftp://user@host/x",
    "simplecache::s3://bucket/x",
    "dir::memory://a",
]


@pytest.mark.parametrize(
    ("url", "scheme", "path", "child"),
    [
        ("s3://b/x", "s3", "b/x", "s3://b/x/n"),
        ("S3://b/x/", "s3", "b/x", "s3://b/x/n"),
        ("s3a://b", "s3", "b", "s3a://b/n"),
        ("s3://b/x?y#z [*]", "s3", "b/x?y#z [*]", "s3://b/x?y#z [*]/n"),
        ("s3://b/a::b", "s3", "b/a::b", "s3://b/a::b/n"),
        ("/tmp/a b/", "file", "/tmp/a b", "/tmp/a b/n"),
        ("/", "file", "/", "/n"),
        ("file:///tmp/x%20y", "file", "/tmp/x%20y", "/tmp/x%20y/n"),
        ("local:///tmp/x", "file", "/tmp/x", "/tmp/x/n"),
        ("/tmp/./a//b", "file", "/tmp/a/b", "/tmp/a/b/n"),
        ("/tmp/link/../x", "file", "/tmp/link/../x", "/tmp/link/../x/n"),
        ("/tmp/a::b", "file", "/tmp/a::b", "/tmp/a::b/n"),
        ("memory://", "memory", "", "memory://n"),
        ("memory:///a/", "memory", "/a", "memory://a/n"),
        ("sftp://u@h:22/x", "sftp", "/x", "sftp://u@h:22/x/n"),
        ("ftp://h", "ftp", "/", "ftp://h/n"),
        ("https://h/p/?token=1", "https", "https://h/p?token=1", "https://h/p/n?token=1"),
        ("simplecache::s3://b/x", "simplecache", "b/x", "simplecache::s3://b/x/n"),
        ("dir::memory", "dir", "", "dir::memory://n"),
        ("zip://sub::s3://b/a.zip", "zip", "sub", "zip://sub/n::s3://b/a.zip"),
        ("zip::/tmp/a.zip", "zip", "", "zip://n::/tmp/a.zip"),
        ("simplecache::zip://a::s3://k/z.zip", "simplecache", "a", "simplecache::zip://a/n::s3://k/z.zip"),
        ("simplecache::s3://b/x::y", "simplecache", "b/x::y", "simplecache::s3://b/x::y/n"),
        ("foo://x/y", "foo", "x/y", "foo://x/y/n"),
    ],
)
def test_a_url_is_taken_apart_and_joined(url: str, scheme: str, path: str, child: str) -> None:
    location = Location(url)
    assert (location.scheme, location.path) == (scheme, path)
    assert location.join("n").url == child
    assert location.join("n/") == location.join("n")
    assert location.join("") is location


@given(base=st.sampled_from(PLAIN_BASES), names=st.lists(NAMES, min_size=1, max_size=3))
def test_names_are_literal_and_levels_add_up(base: str, names: list[str]) -> None:
    location = Location(base, {"key": "v"})
    whole = location.join("/".join(names))
    by_steps = location
    for name in names:
        by_steps = by_steps.join(name)
    assert whole == by_steps
    assert whole.path == f"{location.path.rstrip('/')}/{'/'.join(names)}" or (
        not location.path and whole.path.lstrip("/") == "/".join(names)
    )
    assert whole.storage_options == {"key": "v"}
    assert pickle.loads(pickle.dumps(whole)) == whole


@given(base=st.sampled_from(PLAIN_BASES), name=NAMES.filter(lambda name: ":" not in name))
def test_a_url_that_is_parsed_again_is_the_same(base: str, name: str) -> None:
    joined = Location(base).join(name)
    again = Location(joined.url)
    assert again == joined
    assert again.path == joined.path


def test_names_in_an_http_url_are_percent_encoded() -> None:
    assert Location("https://h/d").join("q?x=1#f/a b/%41").url == "https://h/d/q%3Fx%3D1%23f/a%20b/%2541"


@pytest.mark.parametrize("name", ["/a", "a//b", "..", "a/../b", "./a", "a\0b", "//"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name)
    if name.rstrip("/"):
        with pytest.raises(ConfigError):
            Location("s3://b/x").join(name)


def test_a_separator_of_chains_in_a_name_is_refused_where_it_would_be_one() -> None:
    with pytest.raises(ConfigError, match="separates chained URLs"):
        Location("zip://sub::s3://b/a.zip").join("a::b")


def test_a_local_path_stays_where_it_was_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = Location("run")
    monkeypatch.chdir("/")
    assert location.path == f"{tmp_path}/run"
    assert Location(tmp_path / "run") == location == Location(f"file://{tmp_path}/run")


def test_the_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Location("~/run").path == "/home/somebody/run"
    assert Location("/data").join("~").path == "/data/~"


@pytest.mark.parametrize(
    "url",
    [
        Path("s3://bucket/x"),
        PurePosixPath("gs://bucket/x"),
        Path("s3://bucket/x").absolute(),
        "s3:/bucket/x",
        "simplecache::s3:/bucket/x",
        "/data/s3:/bucket",
        "https:/host/x",
        "foo:/x",
    ],
)
def test_case_99_a_path_that_lost_a_slash_is_refused(url: str | os.PathLike[str]) -> None:
    with pytest.raises(ConfigError, match=r"lost a slash in a pathlib\.Path; pass the URL as a string"):
        Location(url)


@pytest.mark.parametrize("start", ["s3:/", "simplecache::s3:/", "/data/s3:/"])
def test_case_114_a_path_that_lost_a_slash_is_told_without_its_secrets(start: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{start}user:***@host/x?token=***")):
        Location(f"{start}user:hunter2@host/x?token=hunter2")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("s3://", "no bucket"),
        ("gs:///key", "no bucket"),
        ("https://", "no host"),
        ("a\0b", "NUL"),
        (b"s3://b", "must be text"),
        (7, "must be text"),
        (None, "must be text"),
        ("simplecache::", "last part"),
    ],
)
def test_what_can_not_be_meant_is_refused(url: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Location(url)  # type: ignore[arg-type] # that is what is tested


@pytest.mark.parametrize("options", [[("a", 1)], "token", {1: 2}])
def test_options_are_a_mapping_with_text_keys(options: object) -> None:
    with pytest.raises(ConfigError, match="storage_options"):
        Location("s3://b", options)  # type: ignore[arg-type] # that is what is tested


def test_options_are_a_copy_and_the_location_can_not_change() -> None:
    options: dict[str, object] = {"client_kwargs": {"endpoint_url": "http://x"}, "list": [1, {"a": 2}]}
    location = Location("s3://b", options)
    twin = Location("s3://b", copy.deepcopy(options))
    options["key"] = "later"
    for mapping in (options["client_kwargs"], location.storage_options["client_kwargs"]):
        assert isinstance(mapping, dict)
        mapping["endpoint_url"] = "http://elsewhere"
    assert location == twin
    assert hash(location) == hash(twin)
    assert location != Location("s3://b")
    assert location != "s3://b"
    with pytest.raises(AttributeError):
        location._url = "s3://other"
    with pytest.raises(AttributeError):
        del location._url


SECRETS = {
    "sftp://user:hunter2@host/x": "sftp://user:***@host/x",
    "sftp://user:hun/ter2@host/x": "sftp://user:***@host/x",
    "sftp://user@host/x": "sftp://user@host/x",
    "https://t0ken@host/x": "https://***@host/x",
    "https://h/x?X-Amz-Signature=abc&partNumber=1": "https://h/x?X-Amz-Signature=***&partNumber=1",
    "https://h/x?sv=1&sig=abc%2F": "https://h/x?sv=1&sig=***",
    "https://h/x#access_token=abc": "https://h/x#access_token=***",
    "zip://in::https://u:p@h/a.zip?token=abc": "zip://in::https://u:***@h/a.zip?token=***",
    "s3://bucket/q?x=1#f": "s3://bucket/q?x=1#f",
}


@pytest.mark.parametrize("url", SECRETS)
def test_case_114_secrets_of_a_url_are_never_shown(url: str) -> None:
    location = Location(url)
    assert str(location) == SECRETS[url]
    assert f"{location} {location.redacted}" == f"{SECRETS[url]} {SECRETS[url]}"
    assert repr(location) == f"Location({SECRETS[url]!r})"
    assert redact_text(f"GET {url} failed") == f"GET {SECRETS[url]} failed"
    for secret in ("hunter2", "t0ken", "abc", "u:p@"):
        assert secret not in str(location.join("n"))
    assert location.url == url


def test_case_114_options_are_pickled_and_never_shown() -> None:
    options = {
        "key": "AKIA-public",
        "secret": "s3cr3t!!",
        "client_kwargs": {"aws_session_token": "t0k3n!!"},
        "auth": ("user", "passw0rd"),
        "host_key_policy": "auto_add",
    }
    location = Location("s3://b/x", options)
    for shown in (str(location), repr(location), f"{location!r:>40}", repr([location])):
        assert not any(secret in shown for secret in ("s3cr3t", "t0k3n", "AKIA"))
    assert pickle.loads(pickle.dumps(location)).storage_options == options
    said = "denied for s3cr3t!! with t0k3n!! or passw0rd, auto_add, at https://u:pw@h/?sig=1"
    assert location.scrub(said) == "denied for *** with *** or ***, auto_add, at https://u:***@h/?sig=***"


def test_text_without_urls_is_left_alone() -> None:
    for text in ("a=b", "50% of C:/x", "s3://bucket/key is missing", "mail me@host"):
        assert redact_text(text) == text
