"""Whole saves and loads over S3 with a fault at every single request: what is found afterwards is one whole state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

import dcpfs
from dcpfs.config import TransferConfig
from dcpfs.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpfsError,
    IncompleteCheckpointError,
    StorageError,
)
from dcpfs.testing.loopback import LoopbackOnly
from dcpfs.testing.s3_exchange import S3Request, Stage
from dcpfs.testing.s3_faults import (
    Action,
    Drop,
    Effect,
    FlipByte,
    ShortBody,
    Truncate,
    denied,
    slow_down,
)
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.s3_scene import MIB, RETRY, check_words

TRANSFER = TransferConfig(part_bytes=5 * MIB, concurrency=1, read_bytes=4 * MIB)
"""One request at a time, so that the n-th is the same one in every run."""
NAME = "run/step 1"
VALUES = 3 * MIB // 2
"""6 MiB: just two parts."""


def state_of(seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(VALUES, generator=generator),
        "bias": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        "step": seed,
    }


def template() -> dict[str, object]:
    return {"weights": torch.zeros(VALUES), "bias": torch.zeros(7, 5, dtype=torch.bfloat16), "step": -1}


def save(server: ScriptedS3Server, seed: int, *, overwrite: bool = False) -> None:
    options = server.storage_options
    url = server.url(NAME)
    dcpfs.save(state_of(seed), url, storage_options=options, overwrite=overwrite, transfer=TRANSFER, retry=RETRY)


def loaded_seed(server: ScriptedS3Server) -> int:
    """The seed of the state that is found, after proving that it is all of that one."""
    found = template()
    dcpfs.load(found, server.url(NAME), storage_options=server.storage_options, transfer=TRANSFER, retry=RETRY)
    seed = found["step"]
    assert isinstance(seed, int)
    for key, value in state_of(seed).items():
        if isinstance(value, torch.Tensor):
            other = found[key]
            assert isinstance(other, torch.Tensor)
            assert torch.equal(value, other), f"{key} is not that of step {seed}"
    return seed


def what_is_found(server: ScriptedS3Server) -> str:
    server.reset_faults()
    try:
        return f"step {loaded_seed(server)}"
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return "none"


@pytest.fixture(scope="module")
def module_server() -> Iterator[ScriptedS3Server]:
    with ScriptedS3Server() as server:
        yield server


@pytest.fixture
def server(module_server: ScriptedS3Server, caplog: pytest.LogCaptureFixture) -> Iterator[ScriptedS3Server]:
    caplog.set_level(logging.DEBUG, logger="dcpfs")
    module_server.reset()
    assert what_is_found(module_server) == "none"  # whoever looks first also asks for the bucket, and later ones don't
    module_server.forget()
    with LoopbackOnly() as guard:
        yield module_server
    assert guard.foreign == []
    assert module_server.secret_key not in caplog.text
    assert "CreateBucket" not in module_server.operations()
    assert "CopyObject" not in module_server.operations()


def requests_of(server: ScriptedS3Server, work: Callable[[], object]) -> int:
    """How many requests some work makes when nothing fails."""
    server.forget()
    work()
    return len(server.requests())


def but_aborts(request: S3Request) -> bool:
    return request.operation not in ("AbortMultipartUpload", "Connect")


PASSING: dict[str, Action] = {
    "slow_down": slow_down(),
    "unconfirmed": Drop(Stage.RESPONSE_HEAD, effect=Effect.APPLIED),
}


@pytest.mark.parametrize("fault", PASSING)
def test_cases_31_82_a_save_gets_over_a_passing_fault_at_any_request(server: ScriptedS3Server, fault: str) -> None:
    count = requests_of(server, lambda: save(server, 0))
    assert 6 <= count <= 12
    for at in range(count):
        server.reset()
        scripted = server.fail(but_aborts, PASSING[fault], after=at)
        save(server, at)
        assert scripted.hits == 1
        assert not any(upload.parts for upload in server.open_uploads())
        assert loaded_seed(server) == at


def test_cases_31_83_90_a_save_that_fails_at_any_request_leaves_nothing_to_load(
    server: ScriptedS3Server, caplog: pytest.LogCaptureFixture
) -> None:
    count = requests_of(server, lambda: save(server, 0))
    for at in range(count):
        server.reset()
        server.fail(but_aborts, denied(), times=None, after=at)
        with pytest.raises(DcpfsError) as caught:
            save(server, 1)
        check_text(caught.value, server, caplog)
        assert server.open_uploads() == []
        assert server.stored_keys() == [] or at >= count - 4  # nothing can be deleted any more, either
        assert what_is_found(server) in (["none"] if at < count - 2 else ["none", "step 1"])


def check_text(error: DcpfsError, server: ScriptedS3Server, caplog: pytest.LogCaptureFixture) -> None:
    assert f"s3://dcpfs/{NAME}" in str(error)
    if isinstance(error, StorageError):
        check_words(error, server, caplog)


@pytest.mark.parametrize("fault", ["denied", "unconfirmed_for_good"])
def test_cases_2_31_an_overwrite_that_fails_at_any_request_leaves_no_mix(server: ScriptedS3Server, fault: str) -> None:
    actions: dict[str, Action] = {
        "denied": denied(),
        "unconfirmed_for_good": Drop(Stage.RESPONSE_HEAD, effect=Effect.APPLIED),
    }
    save(server, 1)
    old = server.objects.snapshot("dcpfs")
    count = requests_of(server, lambda: save(server, 2, overwrite=True))
    outcomes: list[str] = []
    for at in range(count):
        server.reset_faults()
        server.objects.restore("dcpfs", old)
        server.fail(lambda request: request.operation != "Connect", actions[fault], times=None, after=at)
        with contextlib.suppress(DcpfsError):
            save(server, 2, overwrite=True)
            assert server.read(f"{NAME}/.metadata") != old[f"{NAME}/.metadata"].joined(), "reported and not done"
        outcomes.append(what_is_found(server))
    # The old one until it is withdrawn, then none, and at the very end the new one: whole, if perhaps unconfirmed.
    assert outcomes == sorted(outcomes, key=["step 1", "none", "step 2"].index)
    assert outcomes[0] == "step 1"
    assert "none" in outcomes


@pytest.mark.parametrize("fault", ["slow_down", "short", "cut_off"])
def test_a_load_gets_over_a_passing_fault_at_any_request(server: ScriptedS3Server, fault: str) -> None:
    actions: dict[str, Action] = {
        "slow_down": slow_down(),
        "short": ShortBody(1),
        "cut_off": Drop(Stage.RESPONSE_BODY, after_bytes=20),
    }
    save(server, 3)
    count = requests_of(server, lambda: loaded_seed(server))
    assert 3 <= count <= 12
    for at in range(count):
        server.reset_faults()
        server.fail("*", actions[fault], after=at)
        assert loaded_seed(server) == 3


def test_case_113_a_byte_that_flips_in_any_answer_is_seen(server: ScriptedS3Server) -> None:
    save(server, 4)
    server.forget()
    assert loaded_seed(server) == 4
    reads = sum(map(_reads_data, server.requests()))
    assert reads >= 1
    for at in range(reads):
        for offset in (1000, -1000):
            server.reset_faults()
            scripted = server.fail(_reads_data, FlipByte(offset), after=at)
            with pytest.raises(CorruptCheckpointError, match=r"weights|bias|step"):
                loaded_seed(server)
            assert scripted.hits == 1


def _reads_data(request: S3Request) -> bool:
    return request.operation == "GetObject" and request.key.endswith("__0_0.distcp")


def test_cases_31_85_a_save_whose_objects_arrive_short_fails(server: ScriptedS3Server) -> None:
    for match in ("PutObject", "UploadPart"):
        server.reset()
        server.fail(match, Truncate(1), times=None)
        with pytest.raises(StorageError, match="bytes were sent"):
            save(server, 5)
        assert server.open_uploads() == []
        assert what_is_found(server) == "none"


def test_case_76_a_writer_and_a_reader_move_on_with_their_options(server: ScriptedS3Server) -> None:
    writer = dcpfs.FsspecStorageWriter(
        server.url("run/1"), storage_options=server.storage_options, transfer=TRANSFER, retry=RETRY
    )
    torch_save(state_of(1), storage_writer=writer)
    torch_save(state_of(2), storage_writer=writer, checkpoint_id=server.url("run/2"))
    reader = dcpfs.FsspecStorageReader(server.url("run/1"), storage_options=server.storage_options, retry=RETRY)
    for seed in (1, 2):
        found = template()
        if seed == 1:
            torch_load(found, storage_reader=reader)
        else:
            torch_load(found, storage_reader=reader, checkpoint_id=server.url("run/2"))
        assert found["step"] == seed
    assert server.hosts() == {f"127.0.0.1:{server.port}"}


def test_case_33_the_marker_is_one_put_and_comes_last(server: ScriptedS3Server) -> None:
    save(server, 6)
    writes = [request for request in server.requests() if request.method in ("PUT", "POST", "DELETE")]
    assert writes[-1].key == f"{NAME}/.metadata"
    assert [request.key for request in writes].count(f"{NAME}/.metadata") == 1
    assert "DeleteObject" not in server.operations()
    assert "DeleteObjects" not in server.operations()
