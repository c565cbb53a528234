"""A part that takes over all that was saved for it, whatever it holds itself by now.

Problem: an object that fills up as it works (an average that begins with the first update, a history) is empty in a
fresh process. Its own state as the template asks for nothing, and what was saved is either lost without a word or
refused as unexpected.

Way taken: the template is built from the checkpoint's own keys. What the part has already is filled in place; what it
lacks gets memory. What it has and the checkpoint lacks is missing, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import cast

from torch.distributed.checkpoint.stateful import Stateful

from dcpfs.checkpointer.stored_value import StoredValue
from dcpfs.checkpointer.template_tree import build_tree
from dcpfs.dcp.flatten import flatten

__all__ = ["WholeState"]


class WholeState:
    """An object, or a mapping, under a key of the user's own. See `TemplatePart`.

    Args:
        holder: What has the state.
    """

    def __init__(self, holder: Stateful | MutableMapping[str, object]) -> None:
        self._holder = holder

    def state_dict(self) -> dict[str, object]:
        """The state."""
        holder = self._holder
        return dict(holder) if isinstance(holder, Mapping) else dict(holder.state_dict())

    def template(self, stored: Mapping[str, StoredValue]) -> dict[str, object]:
        """What a load fills."""
        live = self.state_dict()
        if any(key not in stored for key in flatten(live)[0]):
            return live
        return build_tree(stored, live)

    def left_out(self, stored: Mapping[str, StoredValue]) -> dict[str, str]:  # noqa: ARG002 - part of the protocol
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over a filled template."""
        holder = self._holder
        if isinstance(holder, MutableMapping):
            holder.update(state_dict)
        else:
            holder.load_state_dict(cast("dict[str, object]", state_dict))
