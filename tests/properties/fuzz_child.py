"""A process that decodes hostile bytes and watches itself: memory, time, what it does to the system, what it makes.

``python -m tests.properties.fuzz_child TARGET SEED COUNT SECONDS FOLDER``. It writes the number of the input that it is
at into ``FOLDER/at``, so that whoever started it knows which one ended it, and prints one JSON line at its end. What
one input does wrong is an entry of ``faults`` there, and the search goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import random
import resource
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from dcpfs.errors import DcpfsError
from tests.properties.fuzz_targets import TARGETS, Input, MetadataFiles, Steps, Target, Tensors

__all__ = ["judge", "set_high_water_back"]

_MIB = 1 << 20
_SPARE_BYTES = 1 << 30
"""Address space beyond what the process has at its start."""
_GROWTH_BYTES = 192 * _MIB
_GROWTH_FACTOR = 600
"""What one input may take, however much others took before it: what is free in the allocator's heaps goes back to the
system before each, and the process's high-water mark is set back."""
_SLOW_SECONDS = 20.0
_HUNG_SECONDS = 120.0


# --- what nobody may do -------------------------------------------------------------------------------------------

_DEEDS = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn", "os.remove",
    "os.rename", "os.rmdir", "os.chmod", "os.symlink", "os.link", "os.putenv", "os.kill", "shutil.rmtree",
    "socket.connect", "socket.bind", "ctypes.dlopen", "pickle.find_class", "builtins.input", "sys._getframe.set",
    "urllib.Request", "webbrowser.open",
)  # fmt: skip
_deeds: list[str] = []
_watching = False
_allowed_folder = ""


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if not _watching:
        return
    if event == "pickle.find_class" and arguments[0] == "dcpfs.errors":
        return  # an error on its way to another rank
    if event in _DEEDS:
        _deeds.append(f"{event} {arguments!r}"[:200])
    elif event in ("exec", "compile"):
        code = arguments[0]
        name = getattr(code, "co_filename", arguments[-1] if event == "compile" else "")
        if str(name).startswith("<string"):
            _deeds.append(f"{event} {arguments!r}"[:200])
    elif event == "open" and isinstance(arguments[0], (str, bytes)):
        path, flags = os.fsdecode(arguments[0]), arguments[2]
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or "secret" in path or "passwd" in path:
            _deeds.append(f"open {path!r} {flags}")


# --- one input after the other ------------------------------------------------------------------------------------


def _resident_bytes(field: str) -> int:
    """Memory of this process: ``VmRSS`` now, ``VmHWM`` at most since it was set back."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(field))


def set_high_water_back() -> bool:
    """Whether the high-water mark of this process's memory counts from now on; some sandboxes refuse that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


def _give_free_memory_back() -> None:
    """Else an input that takes what others have freed would add nothing to what the process has."""
    if _trim is not None:
        _trim(0)


def _describe(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__}: {error}"[:600] + place


_progress_file = -1


def _progress(text: bytes, at: int = 20) -> None:
    os.pwrite(_progress_file, b"%-20s" % text, at)


def judge(target: Target, made: Input) -> tuple[str, list[str]]:
    """What became of an input, and what was wrong with that."""
    global _watching
    faults = []
    found: object = None
    _give_free_memory_back()
    is_measured = set_high_water_back()
    before_bytes = _resident_bytes("VmRSS") if is_measured else 0
    started_seconds = time.process_time()
    _deeds.clear()
    _watching = True
    try:
        found = target.read(made)
        outcome = ""
    except DcpfsError as error:
        outcome = type(error).__name__
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                faults.append(f"asked for memory that is not there: {error}"[:400])
                break
            cause = cause.__cause__ or cause.__context__
    except BaseException as error:
        outcome = "fault"
        faults.append(_describe(error))
    finally:
        _watching = False
    seconds = time.process_time() - started_seconds
    # The system may have taken back pages of files meanwhile: those make no room for the input.
    if is_measured:
        grown_bytes = _resident_bytes("VmHWM") - min(before_bytes, _resident_bytes("VmRSS"))
        if grown_bytes > _GROWTH_BYTES + _GROWTH_FACTOR * target.size_of(made):
            faults.append(f"took {grown_bytes} bytes for {target.size_of(made)}")
    if seconds > _SLOW_SECONDS:
        faults.append(f"took {seconds:.1f} s")
    writes = isinstance(target, (MetadataFiles, Steps, Tensors))
    faults.extend(deed for deed in _deeds if not writes or "'" + str(target.folder) not in deed)
    if not outcome:
        _progress(b" when others read it")
        try:
            outcome = target.check(made, found)
        except Exception as error:
            outcome = "fault"
            faults.append(_describe(error))
    elif made.how == "untouched":
        faults.append(f"what was saved is refused: {outcome}")
    return outcome, faults


def main(kind: str, seed: int, count: int, seconds: float, folder: Path) -> None:
    global _progress_file
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    target = TARGETS[kind](folder)
    for number in range(60):  # whatever is imported late
        with contextlib.suppress(DcpfsError, AssertionError):
            target.read(target.make(random.Random(-1 - number)))
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + _SPARE_BYTES, size_bytes + _SPARE_BYTES))
    sys.addaudithook(_watch)
    _progress_file = os.open(folder / "at", os.O_CREAT | os.O_WRONLY)
    outcomes: Counter[str] = Counter()
    faults: list[dict[str, object]] = []
    deadline_seconds = time.monotonic() + seconds
    tried = 0
    for number in range(seed, seed + count):
        if time.monotonic() > deadline_seconds:
            break
        _progress(b"%d" % number, 0)
        _progress(b"")
        faulthandler.dump_traceback_later(_HUNG_SECONDS, exit=True)
        made = target.make(random.Random(number))
        outcome, wrong = judge(target, made)
        outcomes[f"{made.how}: {outcome}"] += 1
        tried += 1
        faults.extend({"number": number, "how": made.how, "fault": each} for each in wrong)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"tried": tried, "outcomes": dict(sorted(outcomes.items())), "faults": faults[:40]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
