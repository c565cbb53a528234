"""The settings of the reference trainer, translated.

Problem: the reference (NVIDIA's Cosmos trainers) describes one checkpointer in two objects: a bucket and a path here, a
local directory there, and switches which of them counts. Its configs come as attrs classes, as dataclasses, or as nodes
of OmegaConf, where a value that nobody has set reads as ``???``.

Way taken: attributes or items, whichever the object has, become one dict of settings. What has no equivalent and
changes what is loaded is an error with the remedy; what only changes how the reference goes about it is left out; the
rest that is switched on is named in a warning.

=================================  =========================================================
the reference                      here
=================================  =========================================================
object store not enabled           ``{job.path_local}/checkpoints``
``save_to_object_store.enabled``   ``s3://{bucket}/{job.path}/checkpoints``, ``credentials``
``load_path``                      itself, or ``s3://{load bucket}/{load_path}``
``dcp_async_mode_enabled``         ``async_mode="async_with_pinned_mem"``
``keys_to_skip_loading``           the same; parts of names, not patterns
=================================  =========================================================
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

from dcpfs.errors import ConfigError

__all__ = ["translate"]

_logger = logging.getLogger(__name__)

_MISSING = "???"
"""What OmegaConf has for a value that must be set."""
_SAME = ("load_training_state", "only_load_scheduler_state", "strict_resume")
_UNNEEDED = frozenset(
    {"broadcast_via_filesystem", "enable_gcs_patch_in_boto3", "save_iter", "save_freq_in_epoch", "type", "verbose"}
)
"""How the reference goes about it, and when its trainer saves: nothing to translate."""
_TRANSLATED = frozenset(
    {
        *_SAME,
        "dcp_async_mode_enabled",
        "keys_not_to_resume",
        "keys_to_skip_loading",
        "load_ema_to_reg",
        "load_from_object_store",
        "load_path",
        "save_to_object_store",
    }
)


def translate(checkpoint: object, job: object) -> dict[str, object]:
    """The settings of a `CheckpointConfig` that mean the same.

    Args:
        checkpoint: The reference's checkpoint settings.
        job: Its job settings: ``path`` within a bucket, ``path_local``.

    Raises:
        ConfigError: A setting is missing, or has no equivalent.
    """
    settings: dict[str, object] = {name: _flag(checkpoint, name) for name in _SAME if _has(checkpoint, name)}
    saves, loads = (
        _object_store(checkpoint, "save_to_object_store"),
        _object_store(checkpoint, "load_from_object_store"),
    )
    if saves is None:
        settings["save_dir"] = f"{_need(job, 'path_local', 'job').rstrip('/')}/checkpoints"
    else:
        bucket, credentials = saves
        settings["save_dir"] = f"s3://{bucket}/{_need(job, 'path', 'job').strip('/')}/checkpoints"
        settings["credentials"] = credentials
    if (saves and saves[0]) != (loads and loads[0]):
        _logger.warning(
            "save_to_object_store and load_from_object_store differ: a resume looks where steps are saved, in %s; what "
            "the other one has is loaded when load_path names it",
            settings["save_dir"],
        )
    settings |= _load_path(checkpoint, loads)
    settings["keys_not_to_resume"] = _names(checkpoint, "keys_not_to_resume")
    settings["keys_to_skip_loading"] = tuple(map(re.escape, _names(checkpoint, "keys_to_skip_loading")))
    if _flag(checkpoint, "dcp_async_mode_enabled"):
        settings["async_mode"] = "async_with_pinned_mem"
    if _flag(checkpoint, "load_ema_to_reg"):
        raise ConfigError(
            "can't translate load_ema_to_reg: for a model without net_ema make a config with "
            "rename={'^net[.]': 'raw.', '^net_ema[.]': 'net.'} and keys_to_skip_loading=['^raw[.]']; for one with it, "
            "load and then copy net_ema to net"
        )
    _warn_of_the_rest(checkpoint)
    return settings


def _object_store(checkpoint: object, name: str) -> tuple[str, str | None] | None:
    """Bucket and credentials file of an object store, or None when it is not enabled."""
    store = _get(checkpoint, name)
    if store is None or not _flag(store, "enabled"):
        return None
    credentials = _get(store, "credentials")
    return _need(store, "bucket", name).removeprefix("s3://").strip("/"), str(credentials) if credentials else None


def _load_path(checkpoint: object, loads: tuple[str, str | None] | None) -> dict[str, object]:
    path = _get(checkpoint, "load_path")
    if path is None or path == "":
        return {}
    text = _need(checkpoint, "load_path", "checkpoint")
    if text.endswith(".pt"):
        # The reference passes over it in silence, since another of its checkpointers reads such files.
        _logger.warning(
            "load_path %s is left out: it names a file of torch.save and not a distributed checkpoint", text
        )
        return {}
    if loads is None or "://" in text:
        return {"load_path": text, "load_credentials": None if loads is None else loads[1]}
    return {"load_path": f"s3://{loads[0]}/{text.strip('/')}", "load_credentials": loads[1]}


def _names(checkpoint: object, name: str) -> tuple[str, ...]:
    names = _get(checkpoint, name) or ()
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigError(f"can't translate {name}: it is a {type(names).__name__} and not a list")
    return tuple(map(str, names))


def _warn_of_the_rest(checkpoint: object) -> None:
    fields = checkpoint if isinstance(checkpoint, Mapping) else getattr(checkpoint, "__dict__", {})
    for name in fields:
        known = str(name) in _TRANSLATED or str(name) in _UNNEEDED or str(name).startswith("_")
        if known or not _is_on(_get(checkpoint, str(name))):
            continue
        _logger.warning("the setting %s of the reference has no equivalent here and is left out", name)


def _is_on(value: object) -> bool:
    """Whether a setting asks for something; a group of settings does when it says that it is enabled."""
    if _has(value, "enabled"):
        return bool(_get(value, "enabled"))
    return bool(value) and value != _MISSING


def _has(owner: object, name: str) -> bool:
    return name in owner if isinstance(owner, Mapping) else hasattr(owner, name)


def _get(owner: object, name: str) -> object:
    """An item or attribute, or None. A node of OmegaConf lists a value that must be set, and says it has it not."""
    if isinstance(owner, Mapping):
        return owner[name] if name in owner else _MISSING if name in list(owner) else None
    return getattr(owner, name, None)


def _flag(owner: object, name: str) -> bool:
    value = _get(owner, name)
    if value == _MISSING:
        raise ConfigError(f"can't translate the settings of checkpoint: {name} is not set")
    return bool(value)


def _need(owner: object, name: str, of: str) -> str:
    value = _get(owner, name)
    if value is None or value in ("", _MISSING):
        raise ConfigError(f"can't translate the settings of {of}: {name} is not set")
    return str(value)
