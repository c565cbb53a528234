"""The channel, the meeting place, the process and the watch over its parent, each by itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dcpfs.background.channel import Channel, ChannelClosedError
from dcpfs.background.parent import ParentWatch
from dcpfs.background.process import BackgroundProcess
from dcpfs.background.rendezvous import Rendezvous
from dcpfs.background.worker import main
from dcpfs.errors import ConfigError
from dcpfs.ranks import Ranks

SOON_SECONDS = 60


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = (Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield first, second
    first.close()
    second.close()


def test_messages_of_any_size_and_descriptors_beside_them(ends: tuple[Channel, Channel]) -> None:
    first, second = ends
    reader, writer = os.pipe()
    big = {"data": os.urandom(3 << 20), "text": "ä"}

    def send() -> None:
        first.send("small")
        first.send(big, [writer])
        first.send(b"\x80\x04N.")  # pickled already
        first.shut_sending()

    thread = threading.Thread(target=send)
    thread.start()
    assert second.receive() == ("small", [])
    message, (copy,) = second.receive()
    assert message == big
    assert second.receive() == (None, [])
    thread.join()
    with pytest.raises(ChannelClosedError):
        second.receive()
    os.write(copy, b"x")
    assert os.read(reader, 1) == b"x"
    second.send("the other direction is open still")
    assert first.receive()[0] == "the other direction is open still"
    for descriptor in (reader, writer, copy):
        os.close(descriptor)


def test_case_53_a_peer_that_is_gone_is_an_error_at_once_in_both_directions(ends: tuple[Channel, Channel]) -> None:
    first, second = ends
    second.close()
    second.close()
    with pytest.raises(ChannelClosedError):
        first.receive()
    with pytest.raises(ChannelClosedError):
        first.send("x" * 100_000)
    with pytest.raises(ChannelClosedError):
        second.send(1)


def test_a_message_that_breaks_off_is_an_end() -> None:
    end, raw = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(end)
    raw.sendall((100).to_bytes(8, "little") + b"\0\0\0\0" + b"too short")
    raw.close()
    with pytest.raises(ChannelClosedError):
        channel.receive()
    channel.close()


def test_case_51_the_port_stays_bound_from_its_choice_to_its_use() -> None:
    meetings = [Rendezvous.open(Ranks()) for _ in range(3)]  # as several jobs of one machine have them
    assert len({meeting.address.port for meeting in meetings}) == 3
    for meeting in meetings:
        assert meeting.descriptor is not None
        copy = os.dup(meeting.descriptor)  # what the process that serves gets
        meeting.close()
        meeting.close()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((meeting.address.host, meeting.address.port))
        with socket.socket(fileno=copy) as listener:
            caller = socket.create_connection((meeting.address.host, meeting.address.port))
            accepted, _ = listener.accept()
            caller.close()
            accepted.close()


def test_a_process_that_can_not_work_is_told_about_with_its_exit_code() -> None:
    told: list[object] = []
    ended = threading.Event()

    def end(reason: str) -> None:
        told.append(reason)
        ended.set()

    process = BackgroundProcess(
        "dcpfs.background.nowhere:serve", name="the process", on_message=told.append, on_end=end, niceness=1
    )
    assert ended.wait(SOON_SECONDS)
    assert told == ["the process ended with exit code 1; its log has the reason"]
    assert not process.is_running
    with pytest.raises(ChannelClosedError):
        process.send("x" * 1_000_000)
    process.stop(grace_seconds=0)
    process.stop(grace_seconds=0)


def test_only_dcpfs_is_run_and_an_interpreter_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    with pytest.raises(ValueError, match="'os:abort' is no function of dcpfs"):
        main(["0", "os:abort", "0"])
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ConfigError, match="does not say where Python is"):
        BackgroundProcess("dcpfs.x:y", name="n", on_message=print, on_end=print)


def test_a_parent_that_is_gone_already_is_noticed_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    ended = threading.Event()
    watch = ParentWatch(gone.pid, ended.set)
    assert watch.is_gone
    assert ended.wait(SOON_SECONDS)
    living = ParentWatch(os.getppid(), ended.clear)
    assert not living.is_gone
    assert ended.is_set()
