"""A place that can't be written any more in mid-run: remounted read-only, or its rights taken away."""

from __future__ import annotations

from pathlib import Path

from tests.faults.machine_scene import Story, tell, tell_in_own_mount


def check(stories: dict[str, Story], words: str, root: Path) -> None:
    for mode, story in stories.items():
        for said in (story.save, story.bare):
            text = str(said["text"])
            assert said["type"] == "PermissionDeniedError", mode
            assert said["os_error"], mode
            assert "\n" not in text, mode
            assert f"{root}/run-{mode}" in text
            assert words in text
        assert story.left == [], mode
        assert story.bare_left == [], mode
        assert (story.found, story.found_after) == (1, 3), mode


def test_case_90_a_filesystem_that_becomes_read_only_fails_one_step_and_no_other_in_any_mode(tmp_path: Path) -> None:
    root = tmp_path / "fixed"
    check(tell_in_own_mount(root, "-t tmpfs -o size=32m tmpfs", "read-only"), "read-only", root)


def test_case_90_a_right_that_is_lost_in_mid_run_fails_one_step_and_no_other_in_any_mode(tmp_path: Path) -> None:
    check(tell(tmp_path, "right", as_owner=True), "Permission denied", tmp_path)
