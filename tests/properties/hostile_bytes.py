"""Bytes as nobody should find them in a store: damaged at random, and well-formed with what does harm inside.

Every maker takes a `random.Random` and gives bytes; the same seed gives the same bytes.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence

import torch

__all__ = [
    "NUMBERS",
    "TEXTS",
    "damage",
    "edit_json",
    "edit_numbers",
    "edit_pickle",
    "forge_archive",
    "forge_entry",
    "forge_metadata",
    "random_pickle",
    "random_tensor_pickle",
    "records_of",
    "split_metadata",
    "split_old_file",
]

NUMBERS = (
    *(0, 1, 2, 3, 4, 7, 255, 256, -1, -2),
    *(
        1 << 31,
        (1 << 31) - 1,
        1 << 32,
        1 << 40,
        1 << 61,
        (1 << 61) - 1,
        1 << 62,
        1 << 63,
        1 << 64,
        -(1 << 63),
        -(1 << 70),
    ),
    *(10**9, 10**12, 10**18, 10**40, 1 << 9000),
)
FLOATS = (0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324)
TEXTS = (
    *("", "a", "0", "1", "cpu", "cuda:0", "meta", "latin1", "storage", "model", "..", "../x", "../../outside/secret"),
    *(
        "/etc/passwd",
        "s3://bucket/x",
        "file:///etc/passwd",
        "C:\\x",
        "a::b",
        "a/b",
        "x\0y",
        "\ud800",
        "\u202e\x1b[2J\r\n",
    ),
    *("i4", "f8", "O8", "O", "U4", "V8", "M8", "S2000000000", "<", ">", "|", "9" * 5000, "x" * 5000, "1e999999999"),
    *("__class__", "__setstate__", "data", "int", "default_factory", "_metadata", "torch.strided", "sys_nr", "weight"),
)
NAMES = (
    *(
        "builtins set",
        "builtins frozenset",
        "builtins bytes",
        "builtins bytearray",
        "builtins complex",
        "builtins slice",
    ),
    *("builtins range", "builtins int", "builtins list", "builtins dict", "_codecs encode", "collections OrderedDict"),
    *("collections defaultdict", "collections deque", "collections Counter", "datetime date", "datetime time"),
    *("datetime datetime", "datetime timedelta", "datetime timezone", "decimal Decimal", "fractions Fraction"),
    *(
        "uuid UUID",
        "uuid SafeUUID",
        "io BytesIO",
        "_io BytesIO",
        "pathlib Path",
        "pathlib PosixPath",
        "pathlib PurePath",
    ),
    *("pathlib PureWindowsPath", "torch Size", "torch device", "torch float32", "torch int64", "torch quint8"),
    *(
        "torch complex64",
        "torch float8_e4m3fn",
        "torch uint16",
        "torch strided",
        "torch sparse_coo",
        "torch sparse_csr",
    ),
    *("torch per_tensor_affine", "torch per_channel_affine", "torch Tensor", "torch.nn.parameter Parameter"),
    *("torch.serialization _get_layout", "torch FloatStorage", "torch LongStorage", "torch ByteStorage"),
    *("torch ComplexFloatStorage", "torch BoolStorage", "torch QUInt8Storage", "torch.storage UntypedStorage"),
    *("torch.storage TypedStorage", "torch.storage _load_from_bytes", "torch._utils _rebuild_tensor"),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter"),
    *("torch._utils _rebuild_parameter_with_state", "torch._utils _rebuild_sparse_tensor"),
    *("torch._utils _rebuild_qtensor", "torch._utils _rebuild_nested_tensor", "torch._utils _rebuild_wrapper_subclass"),
    *("torch._utils _rebuild_meta_tensor_no_storage", "torch._utils _rebuild_device_tensor_from_cpu_tensor"),
    *("torch._tensor _rebuild_from_type_v2", "torch.distributed.device_mesh DeviceMesh"),
    *("torch.distributed.tensor.placement_types Shard", "torch.distributed.tensor DTensor"),
    *("torch.distributed.fsdp.api ShardingStrategy", "numpy._core.multiarray _reconstruct", "numpy ndarray"),
    *("numpy._core.multiarray scalar", "numpy._core.numeric _frombuffer", "numpy dtype", "numpy float32"),
    *("numpy.dtypes Float64DType", "numpy.core.multiarray _reconstruct"),
    *(
        f"torch.distributed.checkpoint.metadata {name}"
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
    *("torch.distributed.checkpoint.filesystem _StorageInfo", "torch.distributed.checkpoint.filesystem _StoragePrefix"),
    *("os system", "builtins eval", "builtins exec", "builtins getattr", "subprocess Popen", "posix system"),
    *("torch load", "numpy load", "builtins open", "shutil rmtree", "importlib import_module"),
)


# --- at random ----------------------------------------------------------------------------------------------------


def damage(content: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Flipped bits, other bytes, cuts, insertions, pieces of other files: one to three of them."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        at = chance.randrange(len(data) + 1)
        way = chance.randrange(9)
        if way == 0 or not data:
            data = bytearray(chance.choice(others))
        elif way <= 3:
            data[at - 1] ^= 1 << chance.randrange(8)
        elif way == 4:
            data[at:at] = chance.randbytes(chance.randrange(1, 40))
        elif way == 5:
            del data[at:]
        elif way == 6:
            del data[at : at + chance.randrange(1, 40)]
        elif way == 7:
            other = chance.choice(others)
            data = data[:at] + other[chance.randrange(len(other) + 1) :]
        else:
            stop = min(len(data), at + chance.randrange(1, 9))
            data[at:stop] = chance.choice((b"\xff", b"\0", b"\x7f")) * (stop - at)
    return bytes(data)


# --- JSON ---------------------------------------------------------------------------------------------------------


_DEEP = {
    f"deep {number}": opening * depth + "0" + closing * depth
    for number, (opening, closing, depth) in enumerate(
        (
            *(("[", "]", depth) for depth in (2, 300, 100_000)),
            *(('{"a": ', "}", depth) for depth in (2, 300, 100_000)),
            *(('{"tuple": [', "]}", depth) for depth in (2, 200, 400, 480, 100_000)),
        )
    )
}
"""Stand for texts that `json` could not write."""


def _json_value(chance: random.Random, known: object) -> object:
    way = chance.randrange(9)
    if way == 0:
        return chance.choice(NUMBERS)
    if way == 1:
        return chance.choice(FLOATS)
    if way == 2:
        return chance.choice(TEXTS)
    if way == 3:
        return chance.choice((None, True, False, [], {}, [[]], [{}], {"": None}))
    if way == 4:
        return chance.choice(list(_DEEP))
    if way == 5 and isinstance(known, list):
        return known * 2
    if way == 6 and isinstance(known, list):
        return [chance.choice(NUMBERS)] * len(known)
    if way == 7 and isinstance(known, int):
        return known + chance.choice((-1, 1, 8, -8, 1 << 40))
    return str(known)


def edit_json(value: object, chance: random.Random) -> str:
    """The text of a JSON value in which one to three places hold something else."""
    root: list[object] = [json.loads(json.dumps(value))]
    for _ in range(chance.choice((1, 1, 2, 3))):
        holder: list[object] | dict[str, object] = root
        place: int | str = 0
        while True:
            inner = holder[place]  # type: ignore[index]  # of a list a position, of a dict a name
            if not isinstance(inner, (list, dict)) or not inner or chance.random() < 0.25:
                break
            holder = inner
            place = chance.randrange(len(inner)) if isinstance(inner, list) else chance.choice(list(inner))
        way = chance.randrange(8)
        if way == 0 and holder is not root:
            del holder[place]  # type: ignore[arg-type]  # likewise
        elif way == 1 and isinstance(holder, dict):
            holder[chance.choice(TEXTS)] = holder.pop(str(place))
        else:
            holder[place] = _json_value(chance, holder[place])  # type: ignore[index]  # likewise
    text = json.dumps(root[0])
    for name, deep in _DEEP.items():
        text = text.replace(json.dumps(name), deep)
    if chance.random() < 0.1 and text.startswith("{"):
        name = json.dumps(chance.choice(TEXTS))
        text = f"{{{name}: 1, {name}: 2, {text[1:]}" if len(text) > 2 else text
    return text


# --- pickles ------------------------------------------------------------------------------------------------------


def _number(value: int) -> bytes:
    size_bytes = value.bit_length() // 8 + 1
    data = value.to_bytes(size_bytes, "little", signed=True)
    return b"\x8a%c" % size_bytes + data if size_bytes < 256 else b"\x8b" + struct.pack("<I", size_bytes) + data


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _name(chance: random.Random) -> bytes:
    module, name = chance.choice(NAMES).split()
    return f"c{module}\n{name}\n".encode()


def _storage(chance: random.Random) -> bytes:
    kind = chance.choice(("FloatStorage", "LongStorage", "ByteStorage", "ComplexFloatStorage", "QUInt8Storage"))
    count = chance.choice((4, 2, 16, 2, 16, *NUMBERS))
    return b"(" + _text("storage") + f"ctorch\n{kind}\n".encode() + _text(chance.choice("0129")) + _text("cpu") + (
        _number(count) + chance.choice((b"tQ", b"tQ", b"tQ", b"NtQ"))
    )  # fmt: skip


def _tensor(chance: random.Random) -> bytes:
    rank = chance.choice((0, 1, 1, 1, 2, 3, 70))
    sizes = [_number(chance.choice((0, 1, 2, 2, 4, 4, *NUMBERS))) for _ in range(rank)]
    strides = [_number(chance.choice((0, 1, 1, 1, 2, *NUMBERS))) for _ in range(rank)]
    start = _number(chance.choice((0, 0, 0, 0, 1, *NUMBERS)))
    body = _storage(chance) + start + b"(" + b"".join(sizes) + b"t(" + b"".join(strides) + b"t"
    end = b"\x89ccollections\nOrderedDict\n)R"
    if chance.random() < 0.3:
        return b"ctorch._utils\n_rebuild_tensor_v3\n(" + body + end + _name(chance) + b"tR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + body + end + b"tR"


def _value(chance: random.Random, depth: int) -> bytes:
    """Instructions that leave one more value on the stack, as long as nothing in them is refused."""
    way = chance.randrange(24 if depth > 0 else 8)
    if way == 0:
        return _number(chance.choice(NUMBERS))
    if way == 1:
        return b"G" + struct.pack(">d", chance.choice(FLOATS))
    if way == 2:
        return _text(chance.choice(TEXTS))
    if way == 3:
        return b"C\x08" + chance.randbytes(8)
    if way == 4:
        return chance.choice((b"N", b"\x88", b"\x89", b"]", b"}", b")", b"\x8f"))
    if way == 5:
        return _name(chance)
    if way == 6:
        return b"h%c" % chance.randrange(6)
    if way == 7:
        return _tensor(chance)
    inner = [_value(chance, depth - 1) for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4, 5, 7)))]
    items = b"".join(inner)
    if way == 8:
        return b"(" + items + b"t"
    if way == 9:
        return b"](" + items + b"e"
    if way == 10:
        pairs = b"".join(_value(chance, 0) + each for each in inner)
        return b"}(" + pairs + b"u"
    if way == 11:
        return b"\x8f(" + items + b"\x90"
    if way == 12:
        return b"(" + items + b"\x91"
    if way == 13:
        return _value(chance, depth - 1) + b"q%c" % chance.randrange(6)
    if way == 14:
        return _name(chance) + b"(" + items + b"t\x81"
    if way == 15:
        return _name(chance) + b")\x81" + _value(chance, depth - 1) + b"b"
    if way == 16:
        return _name(chance) + b"(" + items + b"tR" + _value(chance, depth - 1) + b"b"
    if way == 17:
        again = chance.choice((3, 50, 2000))
        return _value(chance, depth - 1) + b"q\5" + b"](" + b"h\5" * again + b"e"
    if way == 18:
        return chance.choice((b"(l", b"(d", b"\x82\1", b"\x97", b"Px\n", b"2", b"0", b"1", b"a", b"s", b"b", b"R"))
    if way == 19:
        state = b"(" + b"".join(_value(chance, 1) for _ in range(chance.choice((3, 5, 7, 8, 9)))) + b"t"
        kind = chance.choice((
            b"cnumpy\ndtype\n" + _text(chance.choice(("i4", "f8", "O8", "M8", "U4", "V8"))) + b"\x89\x88\x87R",
            b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\1b\x87R",
            b"cio\nBytesIO\n)\x81",
        ))  # fmt: skip
        return kind + state + b"b"
    return _name(chance) + b"(" + items + b"tR"


def random_pickle(chance: random.Random) -> bytes:
    """A program for an unpickler, of names that are allowed and others, in ways that make sense and that don't."""
    if chance.random() < 0.02:
        depth = chance.choice((100, 5000, 100_000))
        return (
            b"\x80\x04"
            + chance.choice((b"]" * depth + b"a" * (depth - 1), b"}" + b")" + b"\x85" * depth + b"Ns"))
            + b"."
        )
    return b"\x80%c" % chance.choice((2, 2, 4, 5)) + _value(chance, chance.choice((2, 3, 4, 6))) + b"."


def _instructions(pickled: bytes) -> list[bytes]:
    starts = [position for _, _, position in pickletools.genops(pickled) if position is not None]
    return [pickled[start:stop] for start, stop in zip(starts, [*starts[1:], len(pickled)], strict=True)]


def edit_pickle(pickled: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """A pickle some of whose instructions were changed, dropped, doubled, or taken from another."""
    program = _instructions(pickled)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(program))
        way = chance.randrange(8)
        kind = program[at][:1]
        if way <= 3 and kind in b"KMJI\x8aL":
            program[at] = _number(chance.choice(NUMBERS))
        elif way <= 3 and kind in b"c\x93":
            program[at] = _name(chance)
        elif way <= 3 and kind in b"XC\x8cBU":
            program[at] = _text(chance.choice(TEXTS))
        elif way == 4:
            del program[at]
        elif way == 5:
            program.insert(at, program[chance.randrange(len(program))])
        elif way == 6:
            program[at:at] = [_value(chance, 2), chance.choice((b"", b"0"))]
        else:
            other = _instructions(chance.choice(others))
            start = chance.randrange(len(other))
            program[at : at + 1] = other[start : start + chance.randrange(1, 6)]
        if not program:
            break
    return b"".join(program)


def edit_numbers(pickled: bytes, chance: random.Random) -> bytes:
    """A pickle in which one to three whole numbers are others, mostly small ones: well-formed, of another meaning."""
    program = _instructions(pickled)
    places = [at for at, each in enumerate(program) if each[:1] in (b"K", b"M", b"J", b"\x8a")]
    for _ in range(chance.choice((1, 1, 2, 3))):
        if places:
            program[chance.choice(places)] = _number(chance.choice((0, 1, 2, 3, 4, 5, 6, 8, 24, 30, *NUMBERS)))
    return b"".join(program)


def random_tensor_pickle(chance: random.Random) -> bytes:
    """A tensor of any sizes over a storage of any length."""
    return b"\x80\x02" + _tensor(chance) + b"."


# --- files --------------------------------------------------------------------------------------------------------


def records_of(archive: bytes) -> dict[str, bytes]:
    """The records of what ``torch.save`` wrote, by name."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def forge_archive(records: Mapping[str, bytes], pickled: bytes, chance: random.Random) -> bytes:
    """An archive with right checksums around another pickle, and now and then other records or a false directory."""
    made = {name: pickled if name.endswith("data.pkl") else data for name, data in records.items()}
    prefix = next(iter(made)).partition("/")[0]
    for number, data in enumerate((bytes(16), struct.pack("<qq", 1, 2), bytes(16))):
        made.setdefault(f"{prefix}/data/{number}", data)
    if chance.random() < 0.3:
        name = chance.choice(list(made))
        way = chance.randrange(4)
        if way == 0:
            del made[name]
        elif way == 1:
            made[name] = made[name][: chance.randrange(len(made[name]) + 1)]
        elif way == 2:
            made[name] += bytes(8)
        else:
            made[f"{prefix}/{chance.choice(('constants.pkl', '../x', 'data/../../x', 'byteorder', 'data.pkl/x'))}"] = (
                b"big"
            )
    compression = zipfile.ZIP_DEFLATED if chance.random() < 0.03 else zipfile.ZIP_STORED
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as opened:
        for name, data in made.items():
            opened.writestr(name, data)
    content = bytearray(buffer.getvalue())
    if chance.random() < 0.2:
        lines = [at for at in range(len(content) - 46) if content[at : at + 4] == b"PK\x01\x02"]
        if lines:
            field = chance.choice((8, 10, 20, 24, 28, 30, 32, 42))
            struct.pack_into(
                "<I", content, chance.choice(lines) + field, chance.choice((0, 1, 64, 0xFFFFFFFF, 0x7FFFFFFF))
            )
    return bytes(content)


def forge_entry(records: Mapping[str, bytes], pickled: bytes) -> bytes:
    """An archive as torch itself writes it, aligned and with right checksums, around another pickle."""
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name, data in records.items():
        inner = name.partition("/")[2]
        if inner not in ("version", ".data/serialization_id"):  # which the writer adds
            content = pickled if inner == "data.pkl" else data
            writer.write_record(inner, content, len(content))
    writer.write_end_of_file()
    return buffer.getvalue()


def forge_metadata(pickled: bytes, columns: str) -> bytes:
    """A ``.metadata`` of dcpfs with right checksums around another pickle, and columns of any text."""
    packed = b"DCPFSIX1" + zlib.compress(columns.encode("utf-8", "surrogatepass"), 1)
    checksums = zlib.crc32(packed), zlib.crc32(pickled)
    return pickled + packed + struct.pack("<IQQII8s", 1, len(packed), len(pickled), *checksums, b"DCPFSIDX")


def split_metadata(content: bytes) -> tuple[bytes, object]:
    """The pickle of a ``.metadata`` of dcpfs, and its columns."""
    _, packed_bytes, pickle_bytes, _, _, _ = struct.unpack("<IQQII8s", content[-36:])
    packed = content[pickle_bytes + 8 : pickle_bytes + packed_bytes]
    return content[:pickle_bytes], json.loads(zlib.decompress(packed))


def split_old_file(content: bytes) -> tuple[bytes, bytes, bytes]:
    """What stands before the value of a file of the format before 1.6, its pickle, and what comes after it."""
    ends = [0]
    for _ in range(4):
        stop = max(position for _, _, position in pickletools.genops(content[ends[-1] :]) if position is not None)
        ends.append(ends[-1] + stop + 1)
    return content[: ends[3]], content[ends[3] : ends[4]], content[ends[4] :]
