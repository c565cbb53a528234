"""The suite of what can only be read: over web servers and archives that were filled beforehand."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store
from dcpfs.testing.read_only_conformance import ReadOnlyConformance
from dcpfs.testing.servers_files import FileServer, HttpServer
from dcpfs.testing.servers_system import NginxServer
from tests.conformance.servers_here import RETRY, started


class _Filled(ReadOnlyConformance):
    @pytest.fixture
    def store(self, location: Location) -> Iterator[Store]:
        store = open_store(location, retry=RETRY)
        yield store
        store.close()

    def reopen(self, store: Store) -> Store:
        return open_store(store.location, retry=RETRY)


class _OnServer(_Filled):
    server_class: type[FileServer]
    wrapper = ""

    @pytest.fixture(scope="class")
    @classmethod
    def location(cls) -> Iterator[Location]:
        with started(cls.server_class) as server:
            for name, content in cls.contents().items():
                file = server.data / "run" / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            url, options = server.url("run"), server.storage_options
            yield Location(cls.wrapper + url, {"http": options} if cls.wrapper else options)


class TestNginx(_OnServer):
    server_class = NginxServer


class TestRcloneHttp(_OnServer):
    server_class = HttpServer


class TestRcloneHttpBehindCache(_OnServer):
    server_class = HttpServer
    wrapper = "simplecache::"


class TestZip(_Filled):
    backend = "zip"
    compression: ClassVar[int] = zipfile.ZIP_STORED

    @classmethod
    def pack(cls, archive: Path) -> None:
        with zipfile.ZipFile(archive, "w", cls.compression) as zipped:
            for name, content in cls.contents().items():
                zipped.writestr(f"run/{name}", content)

    @pytest.fixture(scope="class")
    @classmethod
    def location(cls, tmp_path_factory: pytest.TempPathFactory) -> Location:
        archive = tmp_path_factory.mktemp("archive") / "filled.zip"
        cls.pack(archive)
        return Location(f"zip://run::file://{archive}")


class TestZipCompressed(TestZip):
    compression = zipfile.ZIP_DEFLATED


class TestZipOnNginx(TestZip):
    """Which compresses on its way what may be: a range of the archive is a range of what is stored."""

    @pytest.fixture(scope="class")
    @classmethod
    def location(cls) -> Iterator[Location]:
        with started(NginxServer) as server:
            cls.pack(server.data / "filled.zip")
            yield Location(f"zip://run::{server.url('filled.zip')}", {"http": server.storage_options})


class TestTar(_Filled):
    backend = "tar"
    packed: ClassVar[str] = ""

    @pytest.fixture(scope="class")
    @classmethod
    def location(cls, tmp_path_factory: pytest.TempPathFactory) -> Location:
        archive = tmp_path_factory.mktemp("archive") / f"filled.tar{cls.packed and '.'}{cls.packed}"
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=f"w:{cls.packed}") as tarred:  # type: ignore[call-overload] # a known mode
            for name, content in cls.contents().items():
                info = tarfile.TarInfo(f"run/{name}")
                info.size = len(content)
                tarred.addfile(info, io.BytesIO(content))
        archive.write_bytes(buffer.getvalue())
        return Location(f"tar://run::file://{archive}")


class TestTarCompressed(TestTar):
    packed = "gz"
