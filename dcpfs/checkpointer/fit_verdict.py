"""What all ranks together make of a step that was matched: too much to load it, or something to be said.

Problem: a name that one rank lacks a place for may have one on another (stages of a pipeline), so nothing can be judged
by one rank alone; and ranks that judge apart, one by one, raise apart.

Way taken: the fits of all ranks are exchanged first (`load_step`). From them each rank comes to the same verdict here,
and raises or goes on like all others. The coordinator speaks for all in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from dcpfs.checkpointer.layout import TRAINER
from dcpfs.checkpointer.load_report import Strictness
from dcpfs.checkpointer.model_state import list_names
from dcpfs.checkpointer.part_loading import Fit
from dcpfs.checkpointer.trainer_state import EXPECTED_REASONS
from dcpfs.dcp.matching import describe_mismatches, key_mismatch_error

__all__ = ["by_key", "log_fits", "log_left_out", "require_fits"]

_logger = logging.getLogger(__name__)

_REMEDY = (
    "correct the parts or the rename and skip rules, or load what fits with strict_resume=False (for one model alone: "
    "strict=False)"
)


def require_fits(
    fits: Mapping[str, Sequence[Fit]],
    unexpected: Mapping[str, Sequence[str]],
    *,
    strict: Mapping[str, Strictness],
    stored: Mapping[str, Iterable[str]],
    url: str,
    hint: str = "",
) -> None:
    """Return when everything fits as strictly as it has to.

    Args:
        fits: Key to how it fits on the ranks that have it.
        unexpected: Key to the names that no rank has a place for.
        strict: By key; `Strictness.EXACT` for others.
        stored: Key to the names that the checkpoint has, for the closest ones.
        url: Redacted, of the step.
        hint: What else may be wrong, as a part of a sentence.

    Raises:
        KeyMismatchError: Something does not.
    """
    missing: list[str] = []
    excess: list[str] = []
    mismatched: dict[str, str] = {}
    known: list[str] = []
    for key, found in fits.items():
        strictness = strict.get(key, Strictness.EXACT)
        if strictness is Strictness.LOOSE:
            continue
        of_key = dict.fromkeys(f"{key}/{name}" for fit in found for name in fit.missing)
        missing += of_key
        mismatched.update((f"{key}/{name}", text) for fit in found for name, text in fit.mismatched.items())
        if strictness is Strictness.EXACT:
            excess += [f"{key}/{name}" for name in unexpected.get(key, ())]
        if of_key:
            known += [f"{key}/{name}" for name in stored.get(key, ())]
    if missing or excess or mismatched:
        raise key_mismatch_error(
            url,
            missing=missing,
            unexpected=excess,
            mismatched=mismatched,
            known=known,
            remedy=f"{_REMEDY}; {hint}" if hint else _REMEDY,
        )


def log_fits(
    fits: Mapping[str, Sequence[Fit]], unexpected: Mapping[str, Sequence[str]], url_of: Callable[[str], str]
) -> None:
    """Warn of what is not loaded although it was allowed to differ. The coordinator's.

    Args:
        fits: As for `require_fits`.
        unexpected: Likewise.
        url_of: Redacted URL of a key.
    """
    for key, found in fits.items():
        text = describe_mismatches(
            missing=dict.fromkeys(name for fit in found for name in fit.missing),
            unexpected=unexpected.get(key, ()),
            mismatched={name: text for fit in found for name, text in fit.mismatched.items()},
        )
        if text:
            _logger.warning("loading %s in part: %s", url_of(key), text)


def log_left_out(key: str, left_out: Mapping[str, str], url: str, *, is_coordinator: bool) -> None:
    """Say what a part knows and leaves. Of a trainer's state the coordinator speaks for all."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        told = reason in EXPECTED_REASONS or (key == TRAINER and not is_coordinator)
        level = logging.DEBUG if told else logging.WARNING
        _logger.log(level, "loading %s leaves out %s: %s", url, list_names(names), reason)


def by_key(keys: Iterable[str], fits: Sequence[Mapping[str, Fit]]) -> dict[str, list[Fit]]:
    """Key to the fits of the ranks that have it, for those of the keys that any rank has."""
    found = {key: [fit[key] for fit in fits if key in fit] for key in keys}
    return {key: each for key, each in found.items() if each}
