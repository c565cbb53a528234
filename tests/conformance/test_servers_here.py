"""A server that is missing is a skip with its reason, and a failure where the environment asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dcpfs.errors import MissingBackendError
from dcpfs.testing.backends import BACKENDS
from dcpfs.testing.servers_files import FtpServer
from dcpfs.testing.servers_system import NginxServer
from tests.conformance.servers_here import REQUIRED, is_required, started

if TYPE_CHECKING:
    from typing_extensions import Self


class AbsentNginx(NginxServer):
    def __enter__(self) -> Self:
        raise MissingBackendError("start nginx: it is not installed")


def test_what_is_missing_is_skipped_or_fails_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="start nginx: it is not installed"), started(AbsentNginx):
        pass
    monkeypatch.setenv(REQUIRED, "all")
    with pytest.raises(MissingBackendError), started(AbsentNginx):
        pass


def test_what_no_wheel_brings_is_required_with_all_alone() -> None:
    assert not is_required(FtpServer, "")
    assert is_required(FtpServer, "wheels")
    kinds = {backend.server for backend in BACKENDS if backend.server}
    assert sorted(kind.__name__ for kind in kinds if not is_required(kind, "wheels")) == [
        "AzuriteServer",
        "NginxServer",
        "OpensshServer",
        "ParamikoSshServer",
        "SambaServer",
    ]
    assert all(is_required(kind, "all") for kind in kinds)
    with pytest.raises(ValueError, match="none of 'wheels' and 'all'"):
        is_required(FtpServer, "everything")
