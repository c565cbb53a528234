"""What passed a server or proxy since it was last asked to begin anew: requests and bytes by verb, connections, CPU."""

from __future__ import annotations

import threading
import time

__all__ = ["Traffic"]


class Traffic:
    """The counters of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._verbs: dict[str, list[int]] = {}
        self._connections = 0
        self._cpu_at_reset_seconds = time.process_time()

    def connect(self) -> None:
        """Count a connection."""
        with self._lock:
            self._connections += 1

    def count(self, verb: str, *, requests: int = 0, received_bytes: int = 0, sent_bytes: int = 0) -> None:
        """Count requests and bytes of a verb."""
        with self._lock:
            counters = self._verbs.setdefault(verb, [0, 0, 0])
            counters[0] += requests
            counters[1] += received_bytes
            counters[2] += sent_bytes

    def reset(self) -> None:
        """Begin anew."""
        with self._lock:
            self._verbs.clear()
            self._connections = 0
            self._cpu_at_reset_seconds = time.process_time()

    def figures(self) -> dict[str, object]:
        """What was counted, as JSON can hold it."""
        with self._lock:
            verbs = {
                verb: {"requests": requests, "bytes_in": received, "bytes_out": sent}
                for verb, (requests, received, sent) in sorted(self._verbs.items())
            }
            return {
                "verbs": verbs,
                "connections": self._connections,
                "cpu_seconds": time.process_time() - self._cpu_at_reset_seconds,
            }
