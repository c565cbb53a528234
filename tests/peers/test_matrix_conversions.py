"""torch's converters on our checkpoints, and stream transforms (compression) in both directions."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import IO

import pytest
import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from tests.peers.sample_state import assert_same, full_state, odd_state, template_of, textual, trained_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

STATE = {**full_state(), **odd_state(), "trained": trained_state()}


def _template(value: object) -> dict[str, object]:
    template = template_of(value)
    assert isinstance(template, dict)
    return template


def test_dcp_to_torch_save_takes_our_checkpoint(tmp_path: Path) -> None:
    dcpfs.save(STATE, tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt", weights_only=False), textual(STATE))


def test_torch_save_to_dcp_is_read(tmp_path: Path) -> None:
    layout = full_state()["layout"]
    assert isinstance(layout, dict)
    # torch.save refuses one memory under two dtypes.
    state = {**STATE, "layout": {key: layout[key] for key in layout if key not in ("negative", "real_part")}}
    torch.save(state, tmp_path / "in.pt")
    torch_save_to_dcp(tmp_path / "in.pt", tmp_path / "c")
    assert_same(dcpfs.read(tmp_path / "c"), textual(state))
    template = _template(state)
    dcpfs.load(template, tmp_path / "c")
    assert_same(template, state)


class _Deflate(StreamTransformExtension):
    """Compression with what Python brings; written and read in small steps, as a real one would be."""

    @staticmethod
    def registry_name() -> str:
        return "stream.deflate"

    @staticmethod
    def from_descriptor(version: str) -> _Deflate:
        assert version == "1"
        return _Deflate()

    def get_descriptor(self) -> str:
        return "stream.deflate/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Compressor(output)  # type: ignore[return-value]  # a raw stream

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        return _Decompressor(input)  # type: ignore[return-value]  # a raw stream


class _Compressor(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._work = zlib.compressobj(1)

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # a buffer
        self._output.write(self._work.compress(view))
        return view.nbytes

    def close(self) -> None:
        if not self.closed:
            self._output.write(self._work.flush(zlib.Z_FINISH))
            self._output.close()
        super().close()


class _Decompressor(io.RawIOBase):
    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._work = zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # a buffer
        while True:
            raw = self._work.unconsumed_tail or self._source.read(977)
            data = self._work.decompress(raw, len(view))
            if data or (not raw and not self._work.unconsumed_tail):
                view[: len(data)] = data
                return len(data)


class _Xor(StreamTransformExtension):
    """A second transform, so that their order counts."""

    @staticmethod
    def registry_name() -> str:
        return "stream.xor"

    @staticmethod
    def from_descriptor(version: str) -> _Xor:
        return _Xor(int(version))

    def __init__(self, key: int) -> None:
        self.key = key

    def get_descriptor(self) -> str:
        return f"stream.xor/{self.key}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _XorStream(output, self.key)  # type: ignore[return-value]  # a raw stream

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        return _XorStream(input, self.key)  # type: ignore[return-value]  # a raw stream


class _XorStream(io.RawIOBase):
    def __init__(self, stream: IO[bytes], key: int) -> None:
        self._stream = stream
        self._table = bytes(byte ^ key for byte in range(256))

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raw = bytes(memoryview(data))  # type: ignore[arg-type]  # a buffer
        self._stream.write(raw.translate(self._table))
        return len(raw)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # a buffer
        data = self._stream.read(len(view)).translate(self._table)
        view[: len(data)] = data
        return len(data)


def _registry() -> ExtensionRegistry:
    registry = ExtensionRegistry()
    registry.register(_Deflate)
    registry.register(_Xor)
    return registry


@pytest.mark.parametrize("reader", ["own", "own_planner", "torch"])
@pytest.mark.parametrize(
    ("writer", "extensions"),
    [
        ("own", (_Deflate(),)),
        ("torch", (_Deflate(),)),
        # Of torch's own writer not even torch's reader undoes two in the right order.
        ("own", (_Xor(85), _Deflate())),
        ("own", (_Deflate(), _Xor(85))),
    ],
    ids=["own", "torch", "own-two", "own-two-swapped"],
)
def test_stream_transforms_in_both_directions(
    tmp_path: Path, writer: str, extensions: tuple[StreamTransformExtension, ...], reader: str
) -> None:
    if writer == "own":
        dcp_save(dict(STATE), storage_writer=dcpfs.FsspecStorageWriter(tmp_path / "c", extensions=extensions))
    else:
        dcp_save(dict(STATE), storage_writer=FileSystemWriter(tmp_path / "c", _extensions=extensions))
    expected = textual(STATE, keeps_empty=True)
    template = _template(expected)
    if reader == "torch":
        dcp_load(template, storage_reader=FileSystemReader(tmp_path / "c", _extension_registry=_registry()))
    else:
        planner = dcpfs.LoadPlanner() if reader == "own_planner" else None
        own = dcpfs.FsspecStorageReader(tmp_path / "c", extension_registry=_registry())
        dcp_load(template, storage_reader=own, planner=planner)
    assert_same(template, expected)
