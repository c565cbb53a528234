"""Values that a frozen config can hold: nobody can change them, and what may be secret does not show.

Problem: a pydantic model that is frozen still hands out its dicts, so that whoever reads ``storage_options`` can change
them for everybody. And the options of a storage client hold keys and tokens, which a ``repr`` in a log, a traceback or
a dumped config gives away (case 114). ``types.MappingProxyType`` stops the first, but can be neither pickled for
another process nor copied.

Way taken: a small immutable mapping, and one for options on top whose text and dump show the names of the options and
only those values that are known to be harmless. Code that opens a store reads the true values as from any mapping. A
URL with a secret in it is a text whose ``repr`` masks that, so that ``vars(config)`` or ``dict(config)`` in a log gives
nothing away; as text it stays what it is, since whoever joins a name to it means the true one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn, TypeVar

from dcpfs.errors import ConfigError
from dcpfs.storage.location import redact_text

__all__ = ["MASK", "FrozenMapping", "MaskedUrl", "StorageOptions"]

V_co = TypeVar("V_co", covariant=True)

MASK = "***"
"""Stands where a value is not shown."""

_HARMLESS = frozenset(
    {
        "account_name",
        "addressing_style",
        "anon",
        "asynchronous",
        "auto_mkdir",
        "endpoint",
        "endpoint_url",
        "project",
        "region",
        "region_name",
        "request_checksum_calculation",
        "response_checksum_validation",
        "signature_version",
        "use_ssl",
        "verify",
    }
)
"""Options whose values help whoever reads a log, and let nobody in. URLs among them are redacted."""


class MaskedUrl(str):
    """A URL whose ``repr`` shows no secret. Equal to the plain text."""

    __slots__ = ()

    @classmethod
    def where_secret(cls, url: str) -> str:
        """The URL itself, or where something in it must not show, one of these."""
        return url if redact_text(url) == url else cls(url)

    def __repr__(self) -> str:
        return repr(redact_text(str(self)))


class FrozenMapping(Mapping[str, V_co]):
    """Text to values, in the order given; immutable, picklable, and equal to any mapping of the same items."""

    __slots__ = ("_items",)

    _items: dict[str, V_co]

    def __init__(self, items: Mapping[str, V_co] | None = None) -> None:
        given: object = {} if items is None else items
        if not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
            raise ConfigError(f"a {type(given).__name__} was given: give a mapping with text keys")
        object.__setattr__(self, "_items", dict(given))

    def __getitem__(self, name: str) -> V_co:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} is immutable; can't set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} is immutable; can't delete {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._items!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._items,)


class StorageOptions(FrozenMapping[object]):
    """What a filesystem takes, with its secrets: they can be read by name, and show in no text.

    Nested mappings become options themselves. Immutable but for lists and objects that were given as values.

    Raises:
        ConfigError: No mapping with text keys; or a value is a mask, so that these options come from a dump.
    """

    __slots__ = ()

    def __init__(self, items: Mapping[str, object] | None = None) -> None:
        super().__init__(items)
        frozen = {name: _freeze(name, value) for name, value in self._items.items()}
        object.__setattr__(self, "_items", frozen)

    def redacted(self) -> dict[str, object]:
        """The names, with the values masked that could be secret: for logs and dumps."""
        return {name: _redact(name, value) for name, value in self._items.items()}

    def revealed(self) -> dict[str, object]:
        """Plain dicts with the true values, for a client. Never log them."""
        return {
            name: value.revealed() if isinstance(value, StorageOptions) else value
            for name, value in self._items.items()
        }

    def __repr__(self) -> str:
        return f"StorageOptions({self.redacted()!r})"


def _freeze(name: str, value: object) -> object:
    if isinstance(value, Mapping):
        return StorageOptions(value)
    if isinstance(value, str) and value == MASK:
        raise ConfigError(f"the storage option {name!r} is masked: a dump shows no secrets, so give the option itself")
    return value


def _redact(name: str, value: object) -> object:
    if isinstance(value, StorageOptions):
        return value.redacted()
    if value is None or isinstance(value, bool):
        return value
    if name in _HARMLESS and isinstance(value, (str, int, float)):
        return redact_text(value) if isinstance(value, str) else value
    return MASK
