"""What a closed store leaves to the next one, and what it does not."""

from __future__ import annotations

import contextlib

import pytest

from dcpfs.errors import PermissionDeniedError
from dcpfs.testing.s3_faults import denied
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.processes import fork_child
from tests.faults.s3_scene import PREFIX, SMALL, open_store, write_large


def test_the_next_store_finds_its_connection_open_and_its_bucket_known(scripted_s3: ScriptedS3Server) -> None:
    with contextlib.closing(open_store(scripted_s3)) as store:
        assert not store.exists("x")
        store.put("x", [SMALL])
    scripted_s3.forget()
    for _ in range(3):
        with contextlib.closing(open_store(scripted_s3)) as store:
            assert store.get("x") == SMALL
            assert not store.exists("absent")
            assert [info.path for info in store.list()] == ["x"]
    assert scripted_s3.connections == 1
    assert "HeadBucket" not in scripted_s3.operations()


def test_open_stores_have_clients_of_their_own(scripted_s3: ScriptedS3Server) -> None:
    with contextlib.closing(open_store(scripted_s3)) as one, contextlib.closing(open_store(scripted_s3)) as other:
        one.put("x", [SMALL])
        assert other.get("x") == SMALL
        assert one._session.client is not other._session.client


def test_case_81_a_client_that_failed_is_not_left_to_the_next(scripted_s3: ScriptedS3Server) -> None:
    with contextlib.closing(open_store(scripted_s3)) as store:
        failed = store._session.client
        scripted_s3.fail("PutObject", denied())
        with pytest.raises(PermissionDeniedError):
            store.put("x", [SMALL])
    with contextlib.closing(open_store(scripted_s3)) as store:
        assert store._session.client is not failed


def test_case_80_a_forked_process_works_with_an_open_store_and_with_a_new_one(scripted_s3: ScriptedS3Server) -> None:
    with contextlib.closing(open_store(scripted_s3)) as store:
        store.put("x", [SMALL])
    with contextlib.closing(open_store(scripted_s3)) as store:
        store.get("x")

        def work() -> None:
            write_large(store, "from the child")
            with contextlib.closing(open_store(scripted_s3)) as another:
                another.put("y", [another.get("x")])
            store.close()

        assert fork_child(work) == 0
        assert store.get("y") == SMALL
        assert store.head("from the child").size_bytes
    assert scripted_s3.open_uploads() == []
    assert f"{PREFIX}/y" in scripted_s3.stored_keys()
