"""``--storage-options`` of every command: JSON, or ``@file`` holding it.

Options can hold secrets: a file keeps them out of the process list, and no command ever prints them.
"""

from __future__ import annotations

import json
from pathlib import Path

from dcpfs.errors import ConfigError

__all__ = ["parse_storage_options"]


def parse_storage_options(text: str) -> dict[str, object]:
    """Parse ``JSON`` or ``@file`` holding it.

    Raises:
        ConfigError: It is no JSON object. The text itself, which can hold a secret, isn't repeated.
    """
    if not text:
        return {}
    source = "--storage-options"
    if text.startswith("@"):
        source = text[1:]
        try:
            text = Path(source).read_text()
        except OSError as error:
            raise ConfigError(f"Can't read the storage options from {source}: {error.strerror}.") from error
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is no JSON: line {error.lineno}, column {error.colno}.") from None
    if not isinstance(options, dict):
        raise ConfigError(f'{source} must be a JSON object such as {{"key": …}}, not a {type(options).__name__}.')
    return options
