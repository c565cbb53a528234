"""What may be taken, by the machine and by every control group above the process."""

from __future__ import annotations

import pytest

from dcpfs.background import free_memory
from dcpfs.background.free_memory import available_bytes, require_memory
from dcpfs.errors import StorageFullError

GB = 1 << 30


def files(tree: dict[str, str], monkeypatch: pytest.MonkeyPatch, groups: list[tuple[int, str]]) -> None:
    def read(directory: str, name: str) -> str:
        try:
            return tree[f"{directory}/{name}"]
        except KeyError as error:
            raise FileNotFoundError(name) from error

    monkeypatch.setattr(free_memory, "_read", read)
    monkeypatch.setattr(free_memory, "_own_groups", lambda: groups)
    monkeypatch.setattr(free_memory, "_of_the_machine", lambda: 100 * GB)


def test_case_68_the_tightest_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "/sys/fs/cgroup/memory.max": f"{50 * GB}\n",
        "/sys/fs/cgroup/memory.current": f"{45 * GB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {20 * GB}\n",  # files can be dropped
        "/sys/fs/cgroup/job/memory.max": "max\n",
        "/sys/fs/cgroup/job/step/memory.max": f"{8 * GB}\n",
        "/sys/fs/cgroup/job/step/memory.current": f"{5 * GB}\n",
        "/sys/fs/cgroup/job/step/memory.stat": "inactive_file 0\n",
    }
    files(tree, monkeypatch, [(2, "/job/step")])
    assert available_bytes() == 3 * GB
    require_memory(2 * GB)
    with pytest.raises(StorageFullError, match=r"takes 3\.22 GB of host memory and 3\.22 GB are free"):
        require_memory(3 * GB)
    files(tree, monkeypatch, [(2, "/")])
    assert available_bytes() == 25 * GB


def test_version_1_and_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    root = "/sys/fs/cgroup/memory"
    tree = {
        f"{root}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{root}/a/memory.limit_in_bytes": f"{4 * GB}\n",
        f"{root}/a/memory.usage_in_bytes": f"{3 * GB}\n",
        f"{root}/a/memory.stat": f"total_inactive_file {GB}\n",
    }
    files(tree, monkeypatch, [(1, "/a")])
    assert available_bytes() == 2 * GB
    files(tree, monkeypatch, [(1, "/elsewhere")])
    assert available_bytes() == 100 * GB
    monkeypatch.setattr(free_memory, "_of_the_machine", lambda: None)
    assert available_bytes() is None
    require_memory(1 << 60)


def test_this_machine_says_something() -> None:
    found = available_bytes()
    assert found is None or found > 0
