"""Settings of transfers and retries: frozen, validated values with units in their names.

Every field says why its default is what it is. Validation happens when a value is made, never in mid-save, and
its error text never repeats the input (an option can hold a secret). The environment is not read here: the
storage clients read their own (AWS_*, fsspec's config files).
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from dcpfs.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "CastPolicy",
    "Choice",
    "DirectIO",
    "Durability",
    "FrozenConfig",
    "ReplicaReads",
    "RetryConfig",
    "TransferConfig",
    "Trust",
    "VerifyMode",
    "retitled_error",
]

_MIB = 1 << 20


class Choice(str, enum.Enum):
    """A choice that is an argument of public functions: what is none of it is an error of dcpfs."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        choices = ", ".join(repr(member.value) for member in cls)
        raise ConfigError(f"a {type(value).__name__} was given that is no {cls.__name__}: give one of {choices}")


class VerifyMode(Choice):
    """What a load checks beside sizes, which are always checked."""

    SIZES = "sizes"
    """Sizes only."""
    CHECKSUMS = "checksums"
    """The CRC-32 of every entry that is read whole (a slice can't be checked without reading the rest)."""


class Trust(Choice):
    """What may be unpickled from a checkpoint."""

    ALLOWLIST = "allowlist"
    """Only the classes that torch and trainers write (`dcpfs.format.allowlist`)."""
    PICKLE = "pickle"
    """Anything: whoever can write the checkpoint can run code in this process."""


class CastPolicy(Choice):
    """Which dtype differences a load may bridge."""

    NEVER = "never"
    """None: a dtype that differs is a mismatch."""
    WIDEN = "widen"
    """Only where every value survives, e.g. bf16 to fp32, int32 to int64."""
    FLOATING = "floating"
    """Also between floating dtypes that lose precision, e.g. fp32 to bf16. Never complex to real, nor float to int."""


class DirectIO(str, enum.Enum):
    """Whether local files are written past the page cache (O_DIRECT)."""

    AUTO = "auto"
    """Where the filesystem takes it and the file is large."""
    NEVER = "never"


class Durability(str, enum.Enum):
    """What a local write waits for."""

    FSYNC = "fsync"
    """File and directory are on the device before the write counts: a power cut loses nothing reported saved."""
    PAGE_CACHE = "page_cache"
    """The kernel has it: survives a killed process, not a power cut."""


class ReplicaReads(Choice):
    """How ranks that need the same bytes get them."""

    EACH = "each"
    """Every rank reads for itself."""
    BROADCAST = "broadcast"
    """One rank reads and sends to the others over the process group: 1/N of the traffic at the store."""


class FrozenConfig(BaseModel):
    """Base of all settings: nobody changes them, unknown fields are errors, and error texts don't repeat the input."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="wrap")
    @classmethod
    def _name_close_fields(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            raise retitled_error(error, cls.__name__, tuple(cls.model_fields)) from None

    @classmethod
    def given(cls, value: Self | None) -> Self:
        """What an argument of a public function was given, or the defaults for None.

        Raises:
            ConfigError: It is something else.
        """
        if value is None:
            return cls()
        if not isinstance(value, cls):
            raise ConfigError(
                f"a {type(value).__name__} was given that is no {cls.__name__}: give dcpfs.{cls.__name__}(...) or None"
            )
        return value


def retitled_error(error: ValidationError, title: str, fields: Sequence[str] = ()) -> ValidationError:
    """The same faults under another title, without the values that were given, which can be secrets.

    Args:
        error: Of pydantic.
        title: What the settings are, and where they come from.
        fields: The fields that there are, to tell the closest one to each name that is none.
    """
    faults = []
    for fault in error.errors(include_url=False, include_context=False):
        text, where = fault["msg"], fault["loc"]
        if fault["type"] == "extra_forbidden" and len(where) == 1 and fields:
            close = difflib.get_close_matches(str(where[0]).lower(), fields, n=1)
            text = "There is no such setting" + (f"; did you mean {close[0]}?" if close else "")
        # A text of ours has no placeholders; pydantic's are filled in by now.
        kind = PydanticCustomError(fault["type"], text)
        faults.append(InitErrorDetails(type=kind, loc=where, input=None))
    return ValidationError.from_exception_data(title, faults, hide_input=True)


class TransferConfig(FrozenConfig):
    """How one rank moves bytes."""

    budget_bytes: Annotated[int, Field(ge=1 * _MIB)] = 512 * _MIB
    """Memory for bytes in flight beyond the state itself, per rank. An item larger than this passes alone.
    512 MiB covers 32 parts of 16 MiB and is small beside any training state."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 32
    """Requests in flight per rank on a remote store. At 80 MB/s per connection, a common figure for S3,
    32 fill a 20 Gbit/s link."""
    local_concurrency: Annotated[int, Field(ge=1, le=256)] = 4
    """Threads per rank on local files: more only contend for memory bandwidth."""
    part_bytes: Annotated[int, Field(ge=64 << 10, le=5 << 30)] | None = None
    """Size of one upload part. None: 16 MiB; on S3 equal shares of the file for all requests in flight, of 8 to 16 MiB,
    up to 64 MiB where all tensors are sent from where they lie (plain CPU memory) and every connection still has three
    parts, and more where the limit of 10,000 parts demands it."""
    read_bytes: Annotated[int, Field(ge=64 << 10)] = 16 * _MIB
    """Largest single ranged read. 16 MiB keeps 1 GB within 64 requests while enough are in flight."""
    coalesce_gap_bytes: Annotated[int, Field(ge=0)] = 64 << 10
    """Ranges nearer than this are read as one: at 80 MB/s a 20 ms request costs as much as 1.6 MB, a gap of 64 KiB
    keeps the bytes moved within 1 % of those needed for typical states."""
    file_bytes: Annotated[int, Field(ge=1 * _MIB)] | None = None
    """A rank's data is split into files of about this size, local ones into no more than a quarter of the files that
    the process may have open. None: one file per rank, written in parallel parts."""
    durability: Durability = Durability.FSYNC
    direct_io: DirectIO = DirectIO.AUTO

    @model_validator(mode="after")
    def _parts_fit_the_budget(self) -> TransferConfig:
        if self.part_bytes is not None and self.part_bytes > self.budget_bytes:
            raise ValueError("part_bytes is larger than budget_bytes: a part would never be let through")
        return self


class RetryConfig(FrozenConfig):
    """When a request to a store is tried again. One policy for every store; see `dcpfs.storage.retrying`."""

    attempts: Annotated[int, Field(ge=1, le=100)] = 30
    """Tries of one request in all, the first included. 30 with the waits below last four minutes: ten end within 30 s
    for every fourth request, so a store that asks to slow down for half a minute fails nearly every save of many
    parts."""
    first_contact_attempts: Annotated[int, Field(ge=1, le=100)] = 10
    """The same, at most, as long as the store has never answered this process: a wrong host or port is told in
    half a minute."""
    deadline_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Total time for one request with all its tries. S3 asks to slow down for minutes at scale;
    s3fs gives up after about 2 s (s3fs PR #865). Where a file can only be copied to its name, since the filesystem has
    no move, the copy gets a second more for every 10 MiB."""
    initial_backoff_seconds: Annotated[float, Field(gt=0)] = 0.25
    """First upper bound of the random wait; it doubles each time (full jitter)."""
    max_backoff_seconds: Annotated[float, Field(gt=0)] = 20.0
    """Upper bound of the random wait, the figure AWS SDKs use."""
    connect_timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    read_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest silence on a connection before the try counts as failed."""
