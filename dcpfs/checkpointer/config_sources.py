"""Where settings come from: a text, a file, the environment. Values in, values out; the config validates them.

Problem: trainers keep their settings in JSON, YAML or TOML, override some from the environment, and each conversion by
hand drops a field or lets a typo pass.

Way taken: each source becomes one nested dict of plain values, which the frozen config then checks as a whole. YAML
needs PyYAML, and TOML on Python 3.10 needs tomli; they are asked for only when such a text is read. This is the one
place where dcpfs reads the environment.

In the environment, ``DCPFS_KEEP_LAST=3`` sets ``keep_last``, ``DCPFS_TRANSFER__CONCURRENCY=8`` a field within
``transfer``, and a value that is JSON counts as such: ``DCPFS_STORAGE_OPTIONS='{"anon": true}'``. A list may also be
given with commas. An empty value counts as not set.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from types import ModuleType

from dcpfs.config import Choice
from dcpfs.errors import ConfigError, MissingBackendError

__all__ = ["TextForm", "decode_environment", "decode_text", "form_of_file", "read_text"]


class TextForm(Choice):
    """How settings are written."""

    JSON = "json"
    YAML = "yaml"
    TOML = "toml"


_FORMS = {".json": TextForm.JSON, ".yaml": TextForm.YAML, ".yml": TextForm.YAML, ".toml": TextForm.TOML}


def form_of_file(path: str | os.PathLike[str]) -> TextForm:
    """The form that a file's name tells.

    Raises:
        ConfigError: It ends otherwise than a file of settings does.
    """
    ending = os.path.splitext(os.fspath(path))[1].lower()
    if ending not in _FORMS:
        raise ConfigError(f"can't read settings from {os.fspath(path)}: its name must end in {', '.join(_FORMS)}")
    return _FORMS[ending]


def read_text(path: str | os.PathLike[str]) -> str:
    """A file of settings.

    Raises:
        ConfigError: It can't be read.
    """
    try:
        with open(os.path.expanduser(os.fspath(path)), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"can't read settings from {os.fspath(path)}: {reason}") from error


def decode_text(
    text: str, form: TextForm, *, section: str | None = None, source: str = "the text"
) -> dict[str, object]:
    """The settings that a text holds.

    Args:
        text: In that form.
        form: JSON, YAML or TOML.
        section: Dotted name of the table that holds them, e.g. ``tool.trainer.checkpoint``; None: the whole text.
        source: What to call the text in errors.

    Raises:
        ConfigError: It can't be parsed, has no such section, or holds no mapping with text keys.
        MissingBackendError: The package that parses the form is not installed.
    """
    value = _parse(text, form, source)
    walked: list[str] = []
    for name in section.split(".") if section else ():
        walked.append(name)
        if not isinstance(value, Mapping) or name not in value:
            raise ConfigError(f"can't read settings from {source}: it has no section {'.'.join(walked)}")
        value = value[name]
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"can't read settings from {source}: it holds a {type(value).__name__}, not names with values"
        )
    return dict(value)


def decode_environment(
    environ: Mapping[str, str], prefix: str, *, fields: Collection[str], texts: Collection[str], lists: Collection[str]
) -> dict[str, object]:
    """The settings that environment variables hold.

    Args:
        environ: The variables.
        prefix: What their names begin with.
        fields: Names of all settings.
        texts: Those that are text, whatever it looks like.
        lists: Those that may be given with commas.

    Raises:
        ConfigError: A name with the prefix is no setting.
    """
    settings: dict[str, object] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(prefix) or not text.strip():
            continue
        field, *inner = variable[len(prefix) :].lower().split("__")
        if field not in fields:
            close = difflib.get_close_matches(field, fields, n=1)
            hint = f"; did you mean {prefix}{close[0].upper()}?" if close else ""
            raise ConfigError(f"can't use the environment variable {variable}: there is no setting {field!r}{hint}")
        value = text if field in texts else _decode_value(text, as_list=field in lists)
        _put(settings, [field, *inner], value, variable)
    return settings


def _decode_value(text: str, *, as_list: bool) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        value = text
    if as_list and not isinstance(value, list):
        return [part.strip() for part in text.split(",") if part.strip()]
    return value


def _put(settings: dict[str, object], names: list[str], value: object, variable: str) -> None:
    level = settings
    for name in names[:-1]:
        below = level.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"can't use the environment variable {variable}: {name} was set as a whole already")
        level = below
    level[names[-1]] = value


def _parse(text: str, form: TextForm, source: str) -> object:
    if form is TextForm.JSON:
        try:
            return json.loads(text)
        except ValueError as error:
            raise _unparsed(source, form, error) from None
    if form is TextForm.YAML:
        yaml = _import("yaml", "PyYAML", form)
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise _unparsed(source, form, error) from None
    toml = _import("tomllib", "tomllib", form) if sys.version_info >= (3, 11) else _import("tomli", "tomli", form)
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise _unparsed(source, form, error) from None


def _unparsed(source: str, form: TextForm, error: Exception) -> ConfigError:
    """Not chained, and without the parser's text: both can show lines with secrets."""
    mark = getattr(error, "problem_mark", None)
    line = getattr(error, "lineno", None) or (mark.line + 1 if mark is not None else None)
    where = f" at line {line}" if line else ""
    return ConfigError(f"can't read settings from {source}: it is no {form.value.upper()} text{where}")


def _import(module: str, package: str, form: TextForm) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingBackendError(
            f"can't read settings written in {form.value.upper()}: the package {package} is not installed; "
            "run pip install 'dcpfs[config]'"
        ) from error
