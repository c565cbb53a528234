"""What only a GPU can show, checked and timed in minutes: ``python -m benchmarks.gpu_check``.

Problem: everything that a save does beside a GPU (streams, events, page-locked memory) has a stand-in on the CPU, which
can't show that the real ones do what is expected of them. A machine with a GPU is seldom at hand, and not for long.

Way taken: one script without options that need thought. It checks values bit for bit while the device goes on writing,
times what training waits for, and prints one JSON object; the exit code is 1 when a check has failed. Each check stands
alone: one that fails does not keep the others from being made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

import dcpfs
from dcpfs.background.arena import Arena
from dcpfs.background.shared_block import SharedBlock
from dcpfs.dcp.host_memory import HostBuffer, HostStaging, flat_bytes, tensor_bytes

__all__ = ["run"]

_MB = 1 << 20
_ROUNDS = 5
_BUSY_CYCLES = 50_000_000
"""Of a device that has other things to do first: some tens of milliseconds."""


def run(size_mb: int, device: torch.device) -> dict[str, object]:
    """All checks. Local; the device must be otherwise idle for the times to mean anything.

    On the CPU the script itself is what is checked.
    """
    checks: dict[str, Callable[[int, torch.device], dict[str, object]]] = {
        "arena": _check_arena,
        "host staging": _check_host_staging,
        "async": lambda size, where: _check_checkpointer("async", size, where),
        "async_with_pinned_mem": lambda size, where: _check_checkpointer("async_with_pinned_mem", size, where),
        "disabled": lambda size, where: _check_checkpointer("disabled", size, where),
        "random states": _check_random_states,
    }
    results: dict[str, object] = {}
    for name, check in checks.items():
        started_seconds = time.monotonic()
        try:
            found: dict[str, object] = {"ok": True, **check(size_mb * _MB, device)}
        except Exception as error:  # noqa: BLE001 - reported as the result of this check
            found = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        found["seconds"] = round(time.monotonic() - started_seconds, 2)
        results[name] = found
        print(f"{name}: {'ok' if found['ok'] else found['error']} ({found['seconds']} s)", file=sys.stderr)
    return {
        "ok": all(isinstance(each, dict) and each["ok"] is True for each in results.values()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dcpfs": dcpfs.__version__,
        "size_mb": size_mb,
        "checks": results,
    }


def _state(size_bytes: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What is easily copied wrong: other dtypes, a transposed one, a conjugate, a scalar, and one on the host."""
    bulk = size_bytes // 8
    tensors = {f"w{number}": torch.empty(bulk // 4, device=device) for number in range(7)}
    wide = torch.empty(1024, bulk // 2048, dtype=torch.bfloat16, device=device)
    return {
        **tensors,
        "turned": wide.t(),
        "small": torch.empty(3, dtype=torch.float64, device=device),
        "scalar": torch.empty((), device=device),
        "eight": torch.empty(128, dtype=torch.float8_e4m3fn, device=device),
        "conjugate": torch.empty(16, dtype=torch.complex64, device=device).conj(),
        "host": torch.empty(1000),
    }


def _fill(state: dict[str, torch.Tensor], value: int) -> None:
    """On the current stream, behind what it has been given so far."""
    for tensor in state.values():
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.copy_(torch.full(tensor.shape, float(value), device=tensor.device).to(tensor.dtype))
        else:
            tensor.fill_(value)


def _holds(copy: torch.Tensor, value: int) -> bool:
    plain = copy.to(torch.float32) if copy.dtype == torch.float8_e4m3fn else copy
    return bool((plain == value).all())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _keep_busy(device: torch.device) -> None:
    """What the compute stream is given next has to wait, and whoever does not wait for that copies old values."""
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]  # torch's has no annotations


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(what)


def _median_ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def _check_arena(size_bytes: int, device: torch.device) -> dict[str, object]:
    """Copies hold what the compute stream had written by then, and nothing of what it writes after the wait."""
    state = _state(size_bytes, device)
    found: dict[str, object] = {}
    blocks: list[SharedBlock] = []

    def share(wanted_bytes: int) -> torch.Tensor:
        blocks.append(SharedBlock.create(wanted_bytes))
        return blocks[-1].tensor

    for kind, arena in (("plain block", Arena()), ("shared block", Arena(share))):
        calls, waits = [], []
        for number in range(1, _ROUNDS + 1):
            _keep_busy(device)
            _fill(state, number)
            started_seconds = time.monotonic()
            copies = arena.stage(list(state.values()))
            calls.append(time.monotonic() - started_seconds)
            _require(
                arena.is_pending or device.type == "cpu",
                "the copies were complete when the call returned: it has waited",
            )
            arena.wait()
            waits.append(time.monotonic() - started_seconds)
            _fill(state, -1)
            _synchronize(device)
            wrong = [name for name, copy in zip(state, copies, strict=True) if not _holds(copy, number)]
            _require(not wrong, f"{kind}: wrong values in {wrong} at save {number}")
        _require(arena._pinned is not None or device.type == "cpu", f"{kind}: the memory is not page-locked")
        _synchronize(device)
        started_seconds = time.monotonic()
        arena.stage(list(state.values()))
        arena.wait()
        seconds = time.monotonic() - started_seconds
        found[kind] = {
            "first call_ms": round(calls[0] * 1e3, 3),
            "later call_ms": _median_ms(calls[1:]),
            "later until copied_ms": _median_ms(waits[1:]),
            "idle device GB/s": round(arena.size_bytes / 1e9 / seconds, 2),
        }
        arena.release()
    for block in blocks:
        block.close()
    return found


def _check_host_staging(size_bytes: int, device: torch.device) -> dict[str, object]:
    """The bounded ring that a save in the caller passes tensors through."""
    source = torch.arange(size_bytes // 4, dtype=torch.int32, device=device)
    wanted = source.cpu()
    staging = HostStaging(device, buffer_bytes=16 * _MB, buffers=4)
    flat, seconds = flat_bytes(source), []
    for _ in range(_ROUNDS):
        started_seconds = time.monotonic()
        starts, held = iter(range(0, flat.numel(), 16 * _MB)), deque[tuple[int, HostBuffer]]()
        while True:
            start = next(starts, None)
            if start is not None:
                buffer = staging.acquire()
                buffer.copy_in(0, flat[start : start + 16 * _MB])
                held.append((start, buffer))
            if not held:
                break
            if start is None or len(held) == 4:
                at, buffer = held.popleft()
                view = buffer.view()
                _require(view == tensor_bytes(wanted)[at : at + len(view)], f"other bytes than the device's at {at}")
                buffer.release()
        seconds.append(time.monotonic() - started_seconds)
    _require(staging.pinned or not source.is_cuda, "the buffers are not page-locked")
    return {"buffers": staging.made, "GB/s, compared": round(flat.numel() / 1e9 / statistics.median(seconds), 2)}


def _check_checkpointer(mode: str, size_bytes: int, device: torch.device) -> dict[str, object]:
    """Saves with parameters overwritten at once, and a load into tensors of the device."""
    state = _state(size_bytes, device)
    calls, waits, total = [], [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        config = dcpfs.CheckpointConfig.model_validate({"save_dir": directory, "async_mode": mode, "keep_last": 2})
        with dcpfs.DistributedCheckpointer(config) as checkpointer:
            for number in range(1, _ROUNDS + 1):
                _keep_busy(device)
                _fill(state, number)
                started_seconds = time.monotonic()
                checkpointer.save_state(number, {"model": state})
                calls.append(time.monotonic() - started_seconds)
                checkpointer.maybe_wait_for_staging()
                waits.append(time.monotonic() - started_seconds)
                _fill(state, -1)
                checkpointer.wait()
                total.append(time.monotonic() - started_seconds)
                stored = dcpfs.read(f"{directory}/iter_{number:09d}/model")
                wrong = [name for name in state if not _holds(_tensor(stored[name]), number)]
                _require(not wrong, f"step {number} holds other values in {wrong}")
            started_seconds = time.monotonic()
            _require(checkpointer.load_state({"model": state}) == _ROUNDS, "another step was loaded")
            _synchronize(device)
            load_seconds = time.monotonic() - started_seconds
            wrong = [name for name, tensor in state.items() if not _holds(tensor, _ROUNDS)]
            _require(not wrong, f"loaded other values into {wrong}")
            moved = [
                name
                for name, tensor in state.items()
                if tensor.device.type != ("cpu" if name == "host" else device.type)
            ]
            _require(not moved, f"{moved} moved to another device")
    return {
        "first save: blocked_ms": round(waits[0] * 1e3, 3),
        "later: call_ms": _median_ms(calls[1:]),
        "later: blocked_ms": _median_ms(waits[1:]),
        "later: until committed_ms": _median_ms(total[1:]),
        "load GB/s": round(size_bytes / 1e9 / load_seconds, 2),
    }


def _check_random_states(size_bytes: int, device: torch.device) -> dict[str, object]:
    """The generators of the device come back."""
    del size_bytes
    with (
        tempfile.TemporaryDirectory() as directory,
        dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=directory)) as checkpointer,
    ):
        checkpointer.save_state(1, {"model": {"w": torch.ones(2, device=device)}})
        wanted = torch.rand(5, device=device)
        checkpointer.load_state({"model": {"w": torch.ones(2, device=device)}})
        _require(torch.rand(5, device=device).equal(wanted), "other numbers are drawn after a load")
    return {}


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a {type(value).__name__} is no tensor")
    return value


def main() -> int:
    """Check; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--size-mb", type=int, default=2048, help="of the state")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"ok": False, "error": "torch sees no CUDA device"}))
        return 1
    report = run(arguments.size_mb, torch.device("cuda", torch.cuda.current_device()))
    print(json.dumps(report, indent=2))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
