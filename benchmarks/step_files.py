"""Directories with many steps, made cheaply: one step is really saved, the others are its files under other names.

Problem: how long a start or a removal takes with 1,000 steps is a question about names and manifests. Saving a thousand
times would take longer than all that is measured.

Way taken: a tiny state is saved by dcpfs, on local files. Each step of the directory has that save's files, byte for
byte, and its manifest with another iteration in it: to anyone who looks, all are whole.

Flow: `template` → `write_steps` → (a contender) → `check_kept`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

import dcpfs
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, parse_step_name, step_name
from dcpfs.checkpointer.manifest import decode_manifest, encode_manifest

from .files import open_files
from .settings import PLACE_PREFIX, Target

__all__ = ["check_kept", "template", "write_steps"]


@lru_cache(maxsize=1)
def template() -> dict[str, bytes]:
    """The files of one saved step, by name relative to it."""
    with tempfile.TemporaryDirectory(prefix=PLACE_PREFIX) as directory:
        with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=directory)) as checkpointer:
            states = {"model": {"weight": torch.arange(64.0)}, "optim": {"state.weight.exp_avg": torch.ones(64)}}
            checkpointer.save_state(1, {**states, "dataloader": {"next": 3}, "trainer": {"tokens": 7}})
        root = Path(directory) / step_name(1)
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def write_steps(target: Target, count: int) -> None:
    """Make a directory with the steps 1 to ``count``, the last of them named as the newest."""
    files: dict[str, bytes] = {LATEST_NAME: f"{step_name(count)}\n".encode()}
    for iteration in range(1, count + 1):
        files.update(_files_of(iteration))
    hands = open_files(target)
    try:
        hands.write_all(files)
    finally:
        hands.close()


def check_kept(target: Target, kept: Collection[int]) -> str | None:
    """Whether exactly these steps are left, with all that they had; the first difference in words, or None."""
    hands = open_files(target)
    try:
        sizes = hands.sizes()
        there = {number for name in sizes if (number := parse_step_name(name.split("/")[0])) is not None}
        if there != set(kept):
            return f"steps {sorted(there ^ set(kept))[:5]} are there or gone, and should not be"
        for iteration in kept:
            for name, content in _files_of(iteration).items():
                if sizes.get(name) != len(content) or hands.read(name) != content:
                    return f"{name} is not what it was"
        return None
    finally:
        hands.close()


def _files_of(iteration: int) -> dict[str, bytes]:
    files = dict(template())
    manifest = decode_manifest(files[MANIFEST_NAME], url="template")
    files[MANIFEST_NAME] = encode_manifest(replace(manifest, iteration=iteration))
    return {f"{step_name(iteration)}/{name}": content for name, content in files.items()}
