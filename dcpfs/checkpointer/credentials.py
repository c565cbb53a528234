"""Credentials of an object store in a JSON file, as the reference trainer keeps them.

Problem: such a file holds boto3's names (``aws_access_key_id``, ``endpoint_url``), which s3fs takes under others,
partly nested. Read once at start, it is copied into configs, logs and child processes, and stale after a rotation
(case 81).

Way taken: a config holds the path alone. The file is read anew whenever a location is made, which is when a store is
about to be opened; error texts name the file and its fields, never a value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from dcpfs.errors import ConfigError
from dcpfs.storage.location import Location

__all__ = ["locate", "read_credentials"]

_KEYS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_session_token": "token"}
"""Name in the file to the option of s3fs."""
_CLIENT = frozenset({"endpoint_url", "region_name", "use_ssl", "verify", "api_version"})
"""What boto3's client takes, and s3fs hands on."""


def read_credentials(path: str | os.PathLike[str]) -> dict[str, object]:
    """The options for s3fs that a credentials file holds. Empty and null fields are left out.

    Raises:
        ConfigError: The file is absent, can't be read, or is no JSON object of the known fields.
    """
    name = os.fspath(path)
    try:
        with open(os.path.expanduser(name), encoding="utf-8") as file:
            fields = json.load(file)
    except OSError as error:
        raise ConfigError(
            f"can't read the credentials file {name}: {error.strerror or type(error).__name__}; give the path of a "
            "JSON file with aws_access_key_id, aws_secret_access_key, endpoint_url and region_name"
        ) from error
    except ValueError as error:
        where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        # The error itself holds the whole text, so it is not chained.
        raise ConfigError(f"can't read the credentials file {name}: it is no JSON text{where}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"can't read the credentials file {name}: it holds a {type(fields).__name__}, not an object")
    unknown = sorted(set(fields) - set(_KEYS) - _CLIENT)
    if unknown:
        raise ConfigError(
            f"can't use the credentials file {name}: its fields {', '.join(unknown)} are unknown; it may have "
            f"{', '.join([*_KEYS, *sorted(_CLIENT)])}"
        )
    given = {field: value for field, value in fields.items() if value not in (None, "")}
    options: dict[str, object] = {_KEYS[field]: value for field, value in given.items() if field in _KEYS}
    client = {field: value for field, value in given.items() if field in _CLIENT}
    if client:
        options["client_kwargs"] = client
    return options


def locate(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, object] | None = None,
    credentials: str | os.PathLike[str] | None = None,
) -> Location:
    """A location whose options are those of a credentials file, overridden by those given.

    The file is read for S3 alone: the reference passes one for every path, and looks at it for S3 only.

    Raises:
        ConfigError: The URL, the options or the file can't be used.
    """
    plain = Location(url, storage_options)
    if credentials is None or plain.scheme != "s3":
        return plain
    return Location(url, _merge(read_credentials(credentials), plain.storage_options))


def _merge(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            merged[name] = _merge(under, value)
        else:
            merged[name] = value
    return merged
