"""One entry of a data file: the tensor or object of one key, as ``torch.save`` would write it.

The parts have modules of their own, joined here for those who write and read entries: `frames` makes the bytes around
a tensor's payload, `headers` finds payload and strides in anyone's entry, `objects` encodes and decodes the rest.
"""

from __future__ import annotations

from dcpfs.format.frames import Frame, FrameSizes, encode_tensor_frame, payload_size_bytes, tensor_frame_sizes
from dcpfs.format.headers import NeedMoreBytes, TensorHeader, UnusualEntry, parse_tensor_header, parse_tensor_tail
from dcpfs.format.objects import check_storable_object, decode_object, decode_tensor_entry, encode_object

__all__ = [
    "Frame",
    "FrameSizes",
    "NeedMoreBytes",
    "TensorHeader",
    "UnusualEntry",
    "check_storable_object",
    "decode_object",
    "decode_tensor_entry",
    "encode_object",
    "encode_tensor_frame",
    "parse_tensor_header",
    "parse_tensor_tail",
    "payload_size_bytes",
    "tensor_frame_sizes",
]
