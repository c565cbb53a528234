"""Scripts as people write them, that save in the background and end in one way or another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcpfs.checkpointer.exit_hook import FAILED_EXIT_CODE
from tests.multiprocess import background_job as job

ROOT = Path(__file__).parents[2]
THREAD, PROCESS = "async", "async_with_pinned_mem"

UNGUARDED = """
import sys, torch, dcpfs
print("the script runs", flush=True)
state = {"w": torch.full((64, 16), 5.0), "number": 5}
with dcpfs.DistributedCheckpointer(
    dcpfs.CheckpointConfig(save_dir=sys.argv[-1], async_mode="async_with_pinned_mem", rng="none")
) as checkpointer:
    checkpointer.save_state(5, {"model": state})
    checkpointer.maybe_wait_for_staging()
    state["w"].zero_()
print(checkpointer.steps(), flush=True)
"""


class Script:
    """A Python process with a text, and where its output goes."""

    def __init__(self, arguments: list[str], *, text: str = "", cwd: Path = ROOT) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.close()
        self.process.stdin = None

    def finish(self) -> tuple[int, str, str]:
        """Exit code, output, errors; its children are gone too, since they hold the ends of these pipes."""
        output, errors = self.process.communicate(timeout=280)
        return self.process.returncode, output, errors


def test_cases_51_58_unguarded_scripts_stdin_and_notebooks_all_at_once(tmp_path: Path) -> None:
    """Several jobs of one machine start at the same time; none is run a second time by its background process."""
    path = tmp_path / "train.py"
    path.write_text(UNGUARDED)
    cells = "import sys\nsys.ps1 = '>>> '\nexec(compile(open(sys.argv[1]).read(), '<cell 1>', 'exec'), globals())"
    starts = {"script": [str(path)], "stdin": ["-"], "notebook": ["-c", cells, str(path)]}
    scripts = {
        name: Script([*arguments, str(tmp_path / name)], text=UNGUARDED if name == "stdin" else "")
        for name, arguments in starts.items()
    }
    for name, script in scripts.items():
        code, output, errors = script.finish()
        assert (code, output) == (0, "the script runs\n[5]\n"), errors
        assert job.read_step(tmp_path / name, 5)["w"].eq(5).all()


ENDING = """
import os, sys
from tests.multiprocess import background_job as job
job.Checkpointer  # everything is imported once; each ending is a fork that comes to its own end
root, mode, *endings = sys.argv[1:]
children = {}
for ending in endings:
    child = os.fork()
    if child == 0:
        break
    children[child] = ending
else:
    for child, ending in children.items():
        print(ending, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit()
log = os.open(f"{root}/{ending}.log", os.O_WRONLY | os.O_CREAT)
os.dup2(log, 1), os.dup2(log, 2)
state = job.State()
deadline_seconds = 2.0 if ending == "hangs" else 60.0
checkpointer = job.Checkpointer(job.config(f"{root}/{ending}", mode, timeout_seconds=deadline_seconds))
def save(number):
    state.fill(number)
    checkpointer.save_state(number, {"model": state})
    checkpointer.maybe_wait_for_staging()
    state.fill(-1)
save(1)
checkpointer.wait()
save(2)
if ending == "exits with 3":
    sys.exit(3)
elif ending.startswith("raises within"):
    with checkpointer:
        raise ValueError("training broke")
elif ending.startswith("raises"):
    raise ValueError("training broke")
elif ending == "forks":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
"""


@pytest.mark.parametrize("mode", [THREAD, PROCESS])
def test_cases_48_60_a_process_that_ends_without_close_finishes_or_says_what_failed(tmp_path: Path, mode: str) -> None:
    wanted = {"ends": 0, "ends, failing": FAILED_EXIT_CODE, "exits with 3": 3, "raises within, failing": 1, "forks": 0}
    wanted["hangs"] = FAILED_EXIT_CODE
    job.make_gate(tmp_path / "hangs", 2)
    if mode == THREAD:
        wanted |= {"raises": 1, "raises, failing": FAILED_EXIT_CODE, "raises within": 1}
    for ending in wanted:
        if ending.endswith("failing"):
            job.plant(tmp_path / ending, 2, "unpicklable")
    code, output, errors = Script(["-c", ENDING, str(tmp_path), mode, *wanted]).finish()
    assert code == 0, errors
    assert output == "".join(f"{ending} {code}\n" for ending, code in wanted.items())
    for ending in wanted:
        save_dir, said = tmp_path / ending, (tmp_path / f"{ending}.log").read_text()
        fails = wanted[ending] == FAILED_EXIT_CODE or ending.endswith("failing")
        assert job.saved(save_dir, 1)
        assert fails or job.saved(save_dir, 2)
        assert (save_dir / "iter_000000002" / "manifest.json").exists() != fails
        assert ("an error that holds a lambda" in said) == ending.endswith("failing")
        assert ("the save of iteration 2 to" in said and "did not end within 2 s" in said) == (ending == "hangs")
        assert ("training broke" in said) == ending.startswith("raises")


IN_A_CHILD = """
import multiprocessing, sys
from tests.multiprocess import background_job as job
def train(save_dir, mode):
    state = job.State()
    checkpointer = job.Checkpointer(job.config(save_dir, mode))
    state.fill(1)
    checkpointer.save_state(1, {"model": state})
context = multiprocessing.get_context("fork")
children = [context.Process(target=train, args=(f"{sys.argv[1]}/{mode}", mode)) for mode in sys.argv[2:]]
for child in children:
    child.start()
for child in children:
    child.join()
print([child.exitcode for child in children])
"""


def test_case_48_children_of_multiprocessing_finish_too(tmp_path: Path) -> None:
    job.plant(tmp_path / PROCESS, 1, "os")
    code, output, errors = Script(["-c", IN_A_CHILD, str(tmp_path), THREAD, PROCESS]).finish()
    assert (code, output) == (0, f"[0, {FAILED_EXIT_CODE}]\n"), errors
    assert job.saved(tmp_path / THREAD, 1)
    assert "the disk is on fire" in errors


FORKING = """
import os, sys, torch, dcpfs
config = dcpfs.CheckpointConfig(save_dir=sys.argv[1], async_mode=sys.argv[2], rng="none", timeout_seconds=60)
state = {"model": {"w": torch.ones(3)}}
with dcpfs.DistributedCheckpointer(config) as checkpointer:
    checkpointer.save_state(1, state)
    checkpointer.wait()
    for leaves in ("by exit", "by the end", "by a save"):
        child = os.fork()
        if child == 0 and leaves == "by exit":
            sys.exit(0)  # through the block, as an exception
        if child == 0 and leaves == "by the end":
            checkpointer.close()
            os._exit(0)
        if child == 0:
            try:
                checkpointer.save_state(9, state)
            except dcpfs.CheckpointError as error:
                os._exit(0 if "a fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, leaves
    checkpointer.save_state(2, state)
    checkpointer.wait()
print(checkpointer.steps(), flush=True)
"""


@pytest.mark.parametrize("mode", ["disabled", THREAD, PROCESS])
def test_case_80_a_forked_child_that_ends_leaves_the_saves_to_its_parent(tmp_path: Path, mode: str) -> None:
    code, output, errors = Script(["-", str(tmp_path / "run"), mode], text=FORKING).finish()
    assert (code, output) == (0, "[1, 2]\n"), errors
    assert "replaced" not in errors
