"""A load planner for ``dcp.load`` that renames and skips.

Problem: torch has none. Copies in the field change the names of the state while torch iterates over it, rename the
model and lose the optimizer, and stop at a skipped entry that has another shape or is not there at all.

Way taken: the checkpoint's metadata is seen under the names of the state (`dcpfs.checkpointer.renaming`), matched as
by `dcpfs.dcp.load_planner`, and each item of the plan is sent back to the name under which it is stored. A skipped
entry is never looked at.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from dcpfs.checkpointer.renaming import Placement, RenameRules, Renaming, find_optimizer_prefixes
from dcpfs.config import CastPolicy, Trust
from dcpfs.dcp.load_planner import LoadPlanner, url_of_metadata
from dcpfs.dcp.matching import describe_mismatches, key_mismatch_error, no_data_error

__all__ = ["RenameLoadPlanner"]

_logger = logging.getLogger(__name__)


class RenameLoadPlanner(LoadPlanner):
    """Plans a load by ``dcp.load`` of a checkpoint that names things otherwise.

    One instance serves one load at a time; its methods belong to the loading thread.

    Args:
        rename: Regular expression to replacement, applied to a parameter's name with ``re.sub``, one rule after
            another, from the checkpoint's name to the state's; where that brings nothing, from the state's name to
            the checkpoint's. Or a function that does the same. In flattened optimizer state (``state.{fqn}.{name}``)
            the parameter's name is what is renamed.
        skip: Regular expressions, searched for in the parameter's name: what matches is not loaded, whatever shape it
            has in the checkpoint, and whether it is there at all.
        allow_partial_load: Load what fits, log what is missing with its closest names, and leave the rest untouched.
            Otherwise missing, unexpected and mismatched keys are an error: a template with a part of the checkpoint's
            names needs it.
        allow_cast: Which dtype differences are no mismatch.
        trust: What may be unpickled from non-tensor entries.

    Attributes:
        missing: Keys of the state that the checkpoint lacks.
        unexpected: Keys of the checkpoint that the state lacks.
        mismatched: Key to a sentence that says how kind, shape or dtype differ.
        skipped: Keys of the state that were skipped.
        renamed: Key of the state to key of the checkpoint, where they differ.

    Raises:
        ConfigError: A pattern is no regular expression.
    """

    def __init__(
        self,
        rename: RenameRules | None = None,
        skip: Sequence[str] = (),
        *,
        allow_partial_load: bool = False,
        allow_cast: CastPolicy = CastPolicy.NEVER,
        trust: Trust = Trust.ALLOWLIST,
    ) -> None:
        super().__init__(strict=not allow_partial_load, allow_cast=allow_cast, trust=trust)
        self.renaming = Renaming(rename, skip)
        self.skipped: tuple[str, ...] = ()
        self.renamed: dict[str, str] = {}

    def create_local_plan(self) -> LoadPlan:
        """Match the whole state under its own names, then plan to read what fits.

        Raises:
            KeyMismatchError: Two entries go to one place; or no partial load was allowed, and something does not fit.
            CorruptCheckpointError: The metadata lists no data for a part of what fits.
        """
        if self.metadata is None:
            raise ValueError("a load needs the checkpoint's metadata")
        stored = self.metadata.state_dict_metadata
        placement = self._place(list(stored))
        seen = dataclasses.replace(
            self.metadata, state_dict_metadata={new: stored[old] for new, old in placement.sources.items()}
        )
        skipped = set(placement.skipped_wanted)
        wanted = {key: value for key, value in self.state_dict.items() if key not in skipped}
        used = {*placement.sources.values(), *placement.skipped_stored}
        self.skipped = placement.skipped_wanted
        self.renamed = {new: old for new, old in placement.sources.items() if new != old}
        self.missing = tuple(key for key in wanted if key not in placement.sources)
        self.unexpected = tuple(key for key in stored if key not in used)
        self.mismatched = self._find_mismatched(wanted, seen)
        unused = self.renaming.describe_unused()
        if self.strict and (self.missing or self.unexpected or self.mismatched):
            remedy = "correct the names with rename or skip, or pass allow_partial_load=True to take what fits"
            raise key_mismatch_error(
                url_of_metadata(self.metadata),
                missing=self.missing,
                unexpected=self.unexpected,
                mismatched=self.mismatched,
                known=stored,
                remedy=f"{remedy}; {unused}" if unused else remedy,
            )
        if unused:
            _logger.warning("loading %s: %s", url_of_metadata(self.metadata), unused)
        if self.missing or self.mismatched:
            text = describe_mismatches(
                missing=self.missing, mismatched=self.mismatched, known=self.unexpected or stored
            )
            _logger.warning("loading %s in part: %s; these stay as they are", url_of_metadata(self.metadata), text)
        fitting = {key: wanted[key] for key in placement.sources if key not in self.mismatched}
        _check_covered(fitting, seen)
        plan = create_default_local_load_plan(fitting, seen, strict=False)
        items = [
            dataclasses.replace(
                item,
                storage_index=dataclasses.replace(
                    item.storage_index, fqn=placement.sources.get(item.storage_index.fqn, item.storage_index.fqn)
                ),
            )
            for item in plan.items
        ]
        return dataclasses.replace(plan, items=items)

    def _place(self, stored: list[str]) -> Placement:
        return self.renaming.sources(stored, prefixes=find_optimizer_prefixes(stored)).place(self.state_dict)


def _check_covered(wanted: Sequence[str] | dict[str, object], metadata: Metadata) -> None:
    """Return when there is data for every element: torch plans nothing, in silence, where there is none."""
    for key in wanted:
        record = metadata.state_dict_metadata[key]
        if isinstance(record, TensorStorageMetadata):
            lacking = math.prod(record.size) - sum(math.prod(chunk.sizes) for chunk in record.chunks)
            if lacking > 0:
                raise no_data_error(key, lacking)
