"""A disk that is full, or a file that may not grow, in mid-run: an error in words, nothing half, and on it goes."""

from __future__ import annotations

import errno
from pathlib import Path

from tests.faults.machine_scene import Story, tell, tell_in_own_mount


def check(stories: dict[str, Story], code: int, words: str, root: Path) -> None:
    for mode, story in stories.items():
        for said in (story.save, story.bare):
            text = str(said["text"])
            assert said["type"] == "StorageFullError", mode
            assert said["os_error"], mode
            assert "\n" not in text, mode
            assert f"Can't write {root}/run-{mode}/" in text
            assert words in text
        assert story.bare["errno"] == code
        assert [name for name in story.left if not name.endswith(".writing")] == [], mode
        assert story.bare_left == [], mode
        assert (story.found, story.found_after) == (1, 3), mode


def test_cases_31_46_a_full_disk_fails_one_step_and_no_other_in_any_mode(tmp_path: Path) -> None:
    root = tmp_path / "small"
    stories = tell_in_own_mount(root, "-t tmpfs -o size=16m tmpfs", "full")
    check(stories, errno.ENOSPC, "free space or raise the quota", root)


def test_case_31_a_limit_of_the_file_size_fails_one_step_and_no_other_in_any_mode(tmp_path: Path) -> None:
    check(tell(tmp_path, "limit"), errno.EFBIG, "limit of a file's size", tmp_path)
