"""Names of everything a checkpointer writes below its ``save_dir``. Pure.

Problem: tools that take any directory starting with ``iter_`` for a step resume from a copy, a backup or a typo, and
delete a user's files when they make room (case 37).

Way taken: one function makes each kind of name and one takes it apart, strictly: only a name that `step_name` itself
would make is a step. All names are relative to ``save_dir`` and ``/``-separated, as stores take them::

    iter_000000005/model/__0_0.distcp     a key, in torch's format
    iter_000000005/dataloader/rank_0.pkl  what belongs to one rank
    iter_000000005/.writing               id of the save that is at work, or died there
    iter_000000005/.protected             retention leaves the step alone
    iter_000000005/manifest.json          the commit marker
    latest_checkpoint.txt                 name of the step to resume from
"""

from __future__ import annotations

import contextlib
import operator
import re
from typing import SupportsIndex

from dcpfs.errors import ConfigError

__all__ = [
    "DATALOADER",
    "KEYS",
    "LATEST_NAME",
    "MANIFEST_NAME",
    "MODEL",
    "OPTIM",
    "PROTECTED_NAME",
    "SCHEDULER",
    "TRAINER",
    "WRITING_NAME",
    "check_iteration",
    "check_key",
    "parse_latest",
    "parse_rank_file_name",
    "parse_step_name",
    "rank_file_name",
    "step_name",
]

MODEL = "model"
OPTIM = "optim"
SCHEDULER = "scheduler"
TRAINER = "trainer"
DATALOADER = "dataloader"
KEYS = (MODEL, OPTIM, SCHEDULER, TRAINER, DATALOADER)
"""What a training state consists of, in the order in which it is saved and loaded."""

MANIFEST_NAME = "manifest.json"
WRITING_NAME = ".writing"
PROTECTED_NAME = ".protected"
LATEST_NAME = "latest_checkpoint.txt"

_STEP = re.compile(r"iter_([0-9]{9}|[1-9][0-9]{9,17})", re.ASCII)
_RANK_FILE = re.compile(r"rank_(0|[1-9][0-9]{0,17})\.pkl", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}", re.ASCII)
_MOST_ITERATIONS = 10**18


def check_iteration(iteration: object) -> int:
    """The iteration, of any library's integer type, when a step can be named after it.

    Raises:
        ConfigError: It is no integer, negative, or has more than 18 digits.
    """
    number = -1
    if isinstance(iteration, SupportsIndex) and not isinstance(iteration, bool):
        with contextlib.suppress(TypeError):  # e.g. an array of one number says so only when it is asked
            number = operator.index(iteration)
    if not 0 <= number < _MOST_ITERATIONS:
        raise ConfigError(f"can't name a step after iteration {iteration!r}: give an integer from 0 up to 10**18 - 1")
    return number


def step_name(iteration: object) -> str:
    """Directory of a step: ``iter_000000005``."""
    return f"iter_{check_iteration(iteration):09}"


def parse_step_name(name: str) -> int | None:
    """The iteration of a step's directory, or None for a name that `step_name` does not make."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def parse_latest(text: str) -> int | None:
    """The iteration that ``latest_checkpoint.txt`` names: its first line, blanks around it stripped; or None.

    People edit the file by hand, so a path or a trailing slash before or after the name is let pass.
    """
    lines = text.lstrip("\ufeff").strip().splitlines()
    return parse_step_name(lines[0].strip().rstrip("/").rsplit("/", 1)[-1]) if lines else None


def rank_file_name(rank: int) -> str:
    """File of what belongs to one global rank: ``rank_0.pkl``."""
    return f"rank_{rank}.pkl"


def parse_rank_file_name(name: str) -> int | None:
    """The global rank of such a file, or None."""
    match = _RANK_FILE.fullmatch(name)
    return None if match is None else int(match[1])


def check_key(key: object) -> str:
    """The key, when a directory of a step can bear its name.

    Raises:
        ConfigError: It can't: it is empty, hidden, too long, or has characters other than letters, digits and ``_.-``.
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key) or key == MANIFEST_NAME or key.endswith("."):
        raise ConfigError(
            f"can't save a state under the key {key!r}: it names a directory, so give 1 to 128 letters, digits and "
            "'_', '-' or '.' that don't begin with a dot"
        )
    return key
