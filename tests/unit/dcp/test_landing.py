"""Landings whose bytes come in pieces, in any order."""

from __future__ import annotations

import pytest
import torch

from dcpfs.dcp.host_memory import tensor_bytes
from dcpfs.dcp.landing import LandingContext, TensorLanding
from dcpfs.errors import CorruptCheckpointError
from dcpfs.format.checksum import crc32


def test_case_113_an_entry_that_goes_to_two_keys_is_checked_for_each() -> None:
    """As a rename may ask for: pieces of both arrive in between each other, and add up to a checksum of each."""
    stored = torch.arange(8.0)
    payload = bytes(tensor_bytes(stored))
    context = LandingContext("memory://run", verify=True)
    targets = {key: torch.zeros(8) for key in ("student", "teacher")}
    student, teacher = (
        TensorLanding(key, "f", context, target, len(payload), 100, crc32(payload)) for key, target in targets.items()
    )
    for landing in (student, teacher):
        landing.accept(0, memoryview(payload)[:16])
    student.accept(16, memoryview(payload)[16:])
    with pytest.raises(CorruptCheckpointError, match="'teacher'"):
        teacher.accept(16, memoryview(bytes(16)))
    assert torch.equal(targets["student"], stored)
