"""How many examples a property gets: a fixed sequence for each run of the suite, a fresh search on demand.

``DCPFS_PROPERTY_SCALE=20 pytest tests/properties`` multiplies the counts and draws anew.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["examples"]

_SCALE = int(os.environ.get("DCPFS_PROPERTY_SCALE", "0"))


def examples(count: int) -> settings:
    """Settings for a property whose examples take a few milliseconds each."""
    return settings(
        max_examples=count * max(1, _SCALE),
        derandomize=_SCALE == 0,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
