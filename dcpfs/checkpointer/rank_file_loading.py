"""What belongs to one rank, on its way out of a step.

Problem: the position in the data is each rank's own. Given to another rank, or restored after the number of ranks
changed, it repeats and drops samples without an error (cases 10, 11); read after the model was filled, a pickle that
can't be decoded leaves a trainer that is half old.

Way taken: the rank's file is found by its global rank in the manifest (another tool's by its name), checked and decoded
before anything of the trainer is changed. Another number of ranks, or another sharing of the data (`rank_dealing`), is
an error, a skip that is said, or the user's hook, which gets the states of all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from torch.distributed.checkpoint.stateful import Stateful

from dcpfs.checkpointer.choices import WorldSizePolicy
from dcpfs.checkpointer.groups import global_rank
from dcpfs.checkpointer.rank_state import RankResize, decode_rank_state
from dcpfs.checkpointer.stored_step import StoredStep
from dcpfs.config import Trust
from dcpfs.errors import (
    BucketNotFoundError,
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    DamagedObjectError,
    IncompleteCheckpointError,
    ObjectNotFoundError,
    UntrustedDataError,
)
from dcpfs.format.checksum import crc32
from dcpfs.ranks import Ranks
from dcpfs.storage.store import Store

__all__ = ["RankFileLoading", "ReshardHook"]

_logger = logging.getLogger(__name__)

_AT_ONCE = 16

ReshardHook = Callable[[Mapping[int, object], RankResize], object]
"""Makes a rank's state of those of all ranks that saved, by their rank."""


class RankFileLoading:
    """The rank files of one key, on one rank.

    Args:
        key: The key.
        part: What takes the state: an object with ``load_state_dict``, or a dict that is updated; None: nobody here.
        stored: The step.
        ranks: Who loads.
        requested: Some rank passed a part. Otherwise what can't be used is a warning.
        policy: What to do under another number of ranks, or when they share the data otherwise.
        redealt: How they do, as the end of a sentence; "": as those that saved, as far as one knows.
        url: Redacted URL of the step, for errors.

    Attributes:
        found: There is a state for this rank.
    """

    def __init__(
        self,
        key: str,
        part: object,
        stored: StoredStep,
        *,
        ranks: Ranks,
        requested: bool,
        policy: WorldSizePolicy | ReshardHook,
        url: str,
        redealt: str = "",
    ) -> None:
        self._key = key
        self._part = part
        self._stored = stored
        self._rank = global_rank(ranks)
        self._world_size = ranks.world_size
        self._requested = requested
        self._policy = policy
        self._redealt = redealt
        self._url = url
        self._state: object = None
        self.found = False

    def read(self, store: Store, *, trust: Trust) -> None:
        """Find, check and decode this rank's state.

        Raises:
            CheckpointError: It was saved by another number of ranks, or by ranks that shared the data otherwise; or
                this rank has none.
            CorruptCheckpointError: It is not what was saved.
            UntrustedDataError: It holds a class outside the allow-list.
        """
        try:
            self._read(store, trust)
        except UntrustedDataError as error:
            if self._requested:
                raise
            _logger.warning("%s; nobody has passed a part for %r, so it is left out", error, self._key)

    def _read(self, store: Store, trust: Trust) -> None:
        names = self._stored.rank_files[self._key]
        world_size = self._stored.world_size
        if world_size is None:
            world_size = max(names) + 1
        if world_size != self._world_size or self._redealt:
            self._resize(store, names, world_size, trust)
            return
        name = names.get(self._rank)
        if name is not None:
            self._state = self._decode(self._get(store, name), name, trust)
            self.found = True
        elif self._part is not None:
            text = f"loading {self._key!r} from {self._url}: the step has no file of rank {self._rank} for it"
            if not self._stored.is_foreign:
                raise CheckpointError(
                    f"{text}, which did not pass one when it was saved; leave it out with keys_not_to_resume",
                    rank=self._rank,
                )
            _logger.warning("%s; it is left as it is", text)

    def _resize(self, store: Store, names: Mapping[int, str], world_size: int, trust: Trust) -> None:
        policy = self._policy
        if not isinstance(policy, WorldSizePolicy):
            files = list(dict.fromkeys(names.values()))
            with ThreadPoolExecutor(min(_AT_ONCE, len(files)), "dcpfs-rank-files") as pool:
                contents = list(pool.map(lambda name: self._get(store, name), files))
            # Decoded apart for each rank, so that a hook may change them.
            data = dict(zip(files, contents, strict=True))
            states = {rank: self._decode(data[name], name, trust) for rank, name in names.items()}
            resize = RankResize(self._rank, self._world_size, world_size)
            self._state = policy(states, resize)
            self.found = True
            return
        what, remedy = f"{world_size} ranks saved it and {self._world_size} load it", ""
        if world_size == self._world_size:
            what, remedy = self._redealt, "; or say with data_rank which part of the data each rank has, as at the save"
        text = f"loading {self._key!r} from {self._url}: {what}"
        if policy is WorldSizePolicy.ERROR and self._requested:
            raise CheckpointError(
                f"{text}, so no rank's state fits; give on_world_size_change a function that makes new states of the "
                f"old ones, or 'skip', or leave it out with keys_not_to_resume{remedy}"
            )
        _logger.warning("%s; it is left as it is", text)

    def _get(self, store: Store, name: str) -> bytes:
        try:
            data = store.get(name)
        except BucketNotFoundError:
            raise
        except DamagedObjectError as error:
            raise CorruptCheckpointError(
                f"loading {self._url}: the store finds damage ({error.message})", file=name, key=self._key
            ) from error
        except ObjectNotFoundError as error:
            raise IncompleteCheckpointError(
                f"loading {self._url}: its file {name!r} is missing; the step is incomplete, so load another one",
                missing=(name,),
            ) from error
        record = self._stored.records.get(name)
        if record is not None and (
            len(data) != record.size_bytes or (record.crc32 is not None and crc32(data) != record.crc32)
        ):
            raise CorruptCheckpointError(
                f"loading {self._url}: the file {name!r} is not the one that was saved; load another step",
                file=name,
                key=self._key,
            )
        return data

    def _decode(self, data: bytes, name: str, trust: Trust) -> object:
        return decode_rank_state(data, trust=trust, url=f"{self._url}/{name}")

    def apply(self) -> object:
        """Give the part its state. Returns the state.

        Raises:
            ConfigError: The part is a mapping and the state is none.
        """
        part, state = self._part, self._state
        if part is None:
            return state
        if isinstance(part, Stateful) or hasattr(part, "load_state_dict"):
            cast("Stateful", part).load_state_dict(cast("dict[str, object]", state))
        elif isinstance(state, Mapping):
            mapping = cast("MutableMapping[object, object]", part)
            mapping.clear()
            mapping.update(state)
        else:
            raise ConfigError(
                f"can't load {self._key!r} into a dict: a {type(state).__name__} was saved; give an object with "
                "load_state_dict"
            )
        return state
