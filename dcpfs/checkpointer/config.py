"""The settings of a checkpointer: one frozen, validated value.

Problem: a checkpointer is configured at the start of a run and used hours later; a typo, a key that does not exist or a
URL that lost a slash then costs the first checkpoint. Settings get logged and saved beside the run, with the secrets of
the store in them (case 114).

Way taken: everything that can be checked without access is checked when the value is made. Unknown fields are errors.
Every text form, `repr`, `model_dump`, JSON and the `repr` of ``vars(config)`` alike, masks what may be secret; the
fields themselves, pickling and copying keep it: a pickle of a config is not for logs. So a dump can be read back only
where no secret was in it, and is refused otherwise.

Flow: ``CheckpointConfig(...)``, `from_file`, `from_text`, `from_env` or `from_cosmos` → `save_location` and
`load_location` when a store is about to be opened: only then a credentials file is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from dcpfs.checkpointer.choices import (
    AsyncMode,
    BestMode,
    DedupPolicy,
    OnExisting,
    OnProcessLoss,
    OnSaveError,
    RngPolicy,
    WhenBusy,
    WorldSizePolicy,
)
from dcpfs.checkpointer.config_sources import TextForm, decode_environment, decode_text, form_of_file, read_text
from dcpfs.checkpointer.credentials import locate
from dcpfs.checkpointer.layout import KEYS, check_iteration, check_key
from dcpfs.checkpointer.mappings import MASK, FrozenMapping, MaskedUrl, StorageOptions
from dcpfs.checkpointer.renaming import Renaming
from dcpfs.config import FrozenConfig, RetryConfig, TransferConfig, Trust, retitled_error
from dcpfs.errors import ConfigError
from dcpfs.storage.location import Location, redact_text

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CheckpointConfig"]

_EXPORT_DTYPES = ("float64", "float32", "bfloat16", "float16")


def _check_url(value: object) -> object:
    if value is None or value == "":
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"a {type(value).__name__} was given: give a URL or path")
    location = Location(value)
    if any(mark in location.url for mark in (f":{MASK}@", f"//{MASK}@", f"={MASK}")):
        raise ConfigError("the URL is masked: a dump shows no secrets, so give the URL itself")
    return location.url


def _check_options(value: object) -> StorageOptions | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"a {type(value).__name__} was given: give a mapping of options")
    return value if isinstance(value, StorageOptions) else StorageOptions(value)


def _check_keys(value: object) -> object:
    if isinstance(value, str):
        raise ConfigError("a text was given: give a list of keys")
    return value if not isinstance(value, Iterable) else tuple(dict.fromkeys(value))


def _check_file(value: object) -> object:
    if value is None or value == "":
        return None
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_rename(value: object) -> object:
    if value is None or callable(value):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for pair in value.items() for each in pair):
        raise ConfigError(f"a {type(value).__name__} was given: give patterns with replacements, or a function")
    return FrozenMapping(value)


def _check_strict(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, Mapping) and all(isinstance(each, bool) for each in value.values()):
        return FrozenMapping(value)
    raise ConfigError(f"a {type(value).__name__} was given: give True, False, or one of these for each key")


def _check_dtype(value: object) -> object:
    if value is None or value == "":
        return None
    name = str(value).removeprefix("torch.")
    if name not in _EXPORT_DTYPES:
        raise ConfigError(f"can't export as {name!r}: give one of {', '.join(_EXPORT_DTYPES)}")
    return name


def _dump_options(value: object) -> dict[str, object] | None:
    return value.redacted() if isinstance(value, StorageOptions) else None


def _dump_rename(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value if value is None else repr(value)


_Url = Annotated[
    str,
    BeforeValidator(_check_url),
    AfterValidator(MaskedUrl.where_secret),
    PlainSerializer(redact_text, return_type=str),
]
_OptionalUrl = Annotated[
    str | None,
    BeforeValidator(_check_url),
    AfterValidator(lambda url: None if url is None else MaskedUrl.where_secret(url)),
    PlainSerializer(lambda url: None if url is None else redact_text(url), return_type=str | None),
]
_Options = Annotated[
    Mapping[str, object] | None,
    PlainValidator(_check_options),
    PlainSerializer(_dump_options, return_type=dict | None),
    WithJsonSchema({"type": "object", "description": "What the filesystem of the URL takes."}),
]
_Keys = Annotated[Sequence[str], BeforeValidator(_check_keys), AfterValidator(tuple)]
_File = Annotated[str | None, BeforeValidator(_check_file)]
_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CheckpointConfig(FrozenConfig):
    """What a `DistributedCheckpointer` does. Immutable, picklable; every text of it is without secrets.

    Raises:
        pydantic.ValidationError: A ``ValueError``: a field is unknown or wrong. The text does not repeat the input.
    """

    save_dir: _Url
    """URL or local path below which the steps are, and where to resume from. A local one is made absolute at once."""
    storage_options: _Options = None
    """What the filesystem of `save_dir` takes, as fsspec names it. Immutable; masked in every text."""
    credentials: _File = None
    """Path of a JSON file of AWS keys, endpoint and region for `save_dir` on S3, read whenever a store is opened. What
    `storage_options` says goes before it."""

    load_path: _OptionalUrl = None
    """Where to start from when `save_dir` has no step to resume: a step, a run's directory, or one key's directory."""
    load_storage_options: _Options = None
    """What the filesystem of `load_path` takes. None: the options of `save_dir` when the scheme is the same, else
    none: a secret is not sent to another kind of store unasked. ``{}`` says none."""
    load_credentials: _File = None
    """As `credentials`, for `load_path`. None: as for `load_storage_options`."""
    load_step: int | None = None
    """Iteration to load instead of the latest, to roll back."""
    load_training_state: bool = False
    """Whether a start from `load_path` takes the whole training state. False: a new run begins at iteration 0 with the
    weights alone, which is what warm starts are mostly for."""
    only_load_scheduler_state: bool = False
    """Whether a start from `load_path` takes the scheduler beside the model."""
    keys_not_to_resume: _Keys = ()
    """Keys to leave as they are, in a resume and a start from `load_path` alike."""
    keys_to_skip_loading: _Keys = ()
    """Regular expressions that are searched for in parameters' names: a start from `load_path` leaves what they match
    as it is, with its optimizer state. A plain text matches itself anywhere."""
    rename: Annotated[
        Mapping[str, str] | Callable[[str], str] | None,
        PlainValidator(_check_rename),
        PlainSerializer(_dump_rename),
        WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
    ] = None
    """Regular expressions with replacements (``re.sub``), or a function, that turn a name in the checkpoint into the
    name in the model, on a start from `load_path`."""
    extra_keys: _Keys = ()
    """Keys beyond model, optim, scheduler, trainer and dataloader that a resume asks for."""
    strict_resume: Annotated[
        bool | Mapping[str, bool],
        PlainValidator(_check_strict),
        PlainSerializer(lambda value: dict(value) if isinstance(value, Mapping) else value),
        WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "object"}]}),
    ] = True
    """Whether names, shapes and dtypes must match. False: load what matches and say what did not. By key, too:
    ``{"model": False}``; keys not named are strict, since a lost optimizer state is seldom meant (case 93)."""
    verify_on_resume: bool = False
    """Whether a resume first reads the step as a whole to compare checksums, and falls back when they differ. False,
    since it reads everything twice; what is loaded is compared in any case."""
    on_world_size_change: WorldSizePolicy = WorldSizePolicy.ERROR
    """What to do with the dataloader's files when another number of ranks wrote them, or ranks that shared the data
    otherwise, by ``data_rank`` or by the model's mesh: an error, since a position in the data then means something else
    (cases 10, 11)."""
    trust: Trust = Trust.ALLOWLIST
    """What may be unpickled, and so what may be saved."""
    rng: RngPolicy = RngPolicy.PER_RANK
    """Whether the random number generators' states travel with a step: without them a resumed run differs."""

    async_mode: AsyncMode = AsyncMode.DISABLED
    """Where a save runs. In the caller by default: the simplest, and no second copy of the state in host memory."""
    max_in_flight: Annotated[int, Field(ge=1, le=16)] = 1
    """Saves at work at once. Each holds a copy of the state in host memory, so one."""
    when_busy: WhenBusy = WhenBusy.WAIT
    """What `save` does when so many are at work: it waits, so that no step that was asked for is left out."""
    background_niceness: Annotated[int, Field(ge=0, le=19)] = 0
    """How far the priority of the background process is below training's, as `nice` counts. 0: equal, so that a save
    ends soonest; more where saves slow training."""
    on_process_loss: OnProcessLoss = OnProcessLoss.RAISE
    """What a save does when a background process was lost and can't be replaced. Raise, since a save in the caller
    stops training for as long as it takes, which nobody expects who asked for a process."""
    on_existing: OnExisting = OnExisting.OVERWRITE
    """What `save` does when the step stands already, e.g. after a roll back."""
    keep_last: _Count | None = None
    """How many of the newest committed steps to keep, and of those that hold more than the model. None: all, since
    nothing is deleted unasked."""
    keep_every: _Count | None = None
    """Keep every step whose iteration is divisible by this, besides."""
    keep_best: _Count | None = None
    """Keep so many of the steps with the best metric, besides."""
    best_mode: BestMode = BestMode.MAX
    """Which metric is the better one."""
    dedup: DedupPolicy = DedupPolicy.BALANCED
    """Who writes what several ranks hold alike: by turns for large items, since one writer would be the slowest."""
    last_save_model_only: bool = False
    """Whether the closing save holds the model alone, for others to use. It can't be resumed from."""
    export_dtype: Annotated[str | None, BeforeValidator(_check_dtype)] = None
    """Dtype of floating values in that closing save: float64, float32, bfloat16 or float16. None: as they are."""
    on_save_error: OnSaveError = OnSaveError.RAISE
    """What a failed save does to training."""
    max_consecutive_failures: _Count = 3
    """With `on_save_error` ``warn``: so many failed saves in a row raise all the same. One or two can be the store's
    bad hour; three in a row are none."""

    transfer: TransferConfig = Field(default_factory=TransferConfig)
    """How bytes are moved, per rank."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """When a request to the store is tried again."""
    timeout_seconds: _Seconds = 3600.0
    """How long a rank waits for the others in one exchange of a save or load, on the checkpointer's own process groups.
    The fastest rank waits that long for the slowest upload: an hour at 1 GB/s is 3.6 TB."""
    phase_timeout_seconds: _Seconds | None = 600.0
    """After which a phase that has not ended is reported with the stacks of all threads; it goes on. 10 min is what a
    collective of NCCL waits by default, so the report comes before a watchdog kills the job. None: never."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for key in self.extra_keys:
            if check_key(key) in KEYS:
                raise ConfigError(f"extra_keys names {key!r}, which is saved and resumed anyway: leave it out")
        known = (*KEYS, *self.extra_keys)
        asked = {"keys_not_to_resume": tuple(self.keys_not_to_resume)}
        if isinstance(self.strict_resume, Mapping):
            asked["strict_resume"] = tuple(self.strict_resume)
        for field, keys in asked.items():
            unknown = [key for key in keys if key not in known]
            if unknown:
                raise ConfigError(f"{field} names {', '.join(map(repr, unknown))}: give keys among {', '.join(known)}")
        self.renaming()
        if self.load_step is not None:
            check_iteration(self.load_step)
        if self.export_dtype is not None and not self.last_save_model_only:
            raise ConfigError("export_dtype is for the closing save of the model alone: set last_save_model_only too")
        return self

    @classmethod
    def from_text(cls, text: str, form: TextForm | str, *, section: str | None = None) -> Self:
        """Read settings from a text.

        Args:
            text: In that form.
            form: ``json``, ``yaml`` or ``toml``.
            section: Dotted name of the part that holds them; None: the whole text.

        Raises:
            ConfigError: It can't be parsed.
            MissingBackendError: The form's package is not installed.
            pydantic.ValidationError: A field is unknown or wrong.
        """
        return cls._of(decode_text(text, TextForm(form), section=section), "the text", section)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, section: str | None = None) -> Self:
        """Read settings from a local file that ends in .json, .yaml, .yml or .toml; otherwise as `from_text`."""
        form, source = form_of_file(path), os.fspath(path)
        return cls._of(decode_text(read_text(path), form, section=section, source=source), source, section)

    @classmethod
    def from_env(
        cls, prefix: str = "DCPFS_", *, base: CheckpointConfig | None = None, environ: Mapping[str, str] | None = None
    ) -> Self:
        """Read settings from environment variables; `dcpfs.checkpointer.config_sources` says how they are named.

        Args:
            prefix: What their names begin with.
            base: Settings for what the environment does not name, e.g. those of a file.
            environ: The variables; None: those of this process.

        Raises:
            ConfigError: A variable with the prefix names no setting.
            pydantic.ValidationError: A field is wrong, or ``save_dir`` is given nowhere.
        """
        settings = decode_environment(
            os.environ if environ is None else environ,
            prefix,
            fields=tuple(cls.model_fields),
            texts=("save_dir", "load_path", "credentials", "load_credentials", "export_dtype"),
            lists=("keys_not_to_resume", "keys_to_skip_loading", "extra_keys"),
        )
        if base is not None:
            inner = {name: value for name, value in settings.items() if isinstance(value, dict)}
            for name, value in inner.items():
                below = getattr(base, name)
                if isinstance(below, FrozenConfig):
                    settings[name] = {**below.model_dump(), **value}
            settings = {**{name: getattr(base, name) for name in base.model_fields_set}, **settings}
        return cls._of(settings, f"the environment ({prefix}…)")

    @classmethod
    def _of(cls, settings: Mapping[str, object], source: str, section: str | None = None) -> Self:
        """Settings that were read somewhere, which their errors name."""
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            where = f"{source}, section {section}" if section else source
            raise retitled_error(error, f"{cls.__name__} in {where}") from None

    @classmethod
    def from_cosmos(cls, checkpoint: object, job: object) -> Self:
        """Translate the settings of the reference trainer; see `dcpfs.checkpointer.cosmos`.

        Args:
            checkpoint: ``save_to_object_store``, ``load_from_object_store``, ``load_path``, …: a mapping, or an object
                with these attributes.
            job: ``path`` and ``path_local``, likewise.

        Raises:
            ConfigError: A setting is missing, or has no equivalent here.
        """
        from dcpfs.checkpointer.cosmos import translate

        return cls.model_validate(translate(checkpoint, job))

    def save_location(self) -> Location:
        """Where steps are saved and resumed from. Reads the credentials file, where there is one.

        Raises:
            ConfigError: The credentials file can't be used.
        """
        return locate(self.save_dir, self.storage_options, self.credentials)

    def load_location(self) -> Location | None:
        """What `load_path` names, or None. Reads the credentials file, where there is one.

        Raises:
            ConfigError: The credentials file can't be used.
        """
        if self.load_path is None:
            return None
        options, credentials = self.load_storage_options, self.load_credentials
        if (
            options is None
            and credentials is None
            and Location(self.load_path).scheme == Location(self.save_dir).scheme
        ):
            options, credentials = self.storage_options, self.credentials
        return locate(self.load_path, options, credentials)

    def renaming(self) -> Renaming:
        """The rules of `rename` and `keys_to_skip_loading`, which apply to a start from `load_path`."""
        return Renaming(self.rename, self.keys_to_skip_loading)

    def is_strict(self, key: str) -> bool:
        """Whether a load of the key must match in everything."""
        return self.strict_resume if isinstance(self.strict_resume, bool) else self.strict_resume.get(key, True)

    def __repr_args__(self) -> Iterable[tuple[str | None, object]]:
        for name, value in super().__repr_args__():
            yield name, redact_text(value) if name in ("save_dir", "load_path") and isinstance(value, str) else value
