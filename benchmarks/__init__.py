"""Benchmarks of dcpfs against torch's own classes, its peers and the floor of the machine.

Problem: a figure for a checkpoint library is easily wrong. A full S3 server on the same cores hides the
client, the first touch of pages hides the copy, a neighbour's load hides both, and a contender that lost data
looks fast.

Way taken: one question a case; contenders behind one interface, each in a process of its own, alternating; a
sink that costs next to nothing as the server, or the user's own store, behind a proxy that makes it seem far away;
client CPU seconds per GB, memory, requests and bytes beside wall time; and no figure before what was loaded has been
compared bit for bit with what was saved. The start of a process, its imports and the making of the state come before
the clock.

Flow: `benchmarks.cli` → `benchmarks.runner` (plans repetitions, starts clients) → `benchmarks.client` (one
contender, one process a rank) → `benchmarks.report` (JSON lines, Markdown). `python -m benchmarks --help`
lists the rest.
"""

from __future__ import annotations

__all__: list[str] = []
