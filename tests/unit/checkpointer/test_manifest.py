from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dcpfs.checkpointer.manifest import FileRecord, Manifest, decode_manifest, encode_manifest
from dcpfs.errors import CorruptCheckpointError, UntrustedDataError

MANIFEST = Manifest(
    "an id",
    5,
    2,
    {
        "model/__0_0.distcp": FileRecord(7, 0xFFFFFFFF),
        "model/.metadata": FileRecord(3),
        "dataloader/rank_0.pkl": FileRecord(0, 0),
    },
    ("model",),
    {"dataloader": {0: "dataloader/rank_0.pkl", 1: "dataloader/rank_0.pkl"}},
    metric=0.5,
    created_seconds=1.5,
    versions={"dcpfs": "1"},
    topology={"mesh_shape": [2]},
    fingerprint={"model": 9},
)


def test_a_manifest_comes_back() -> None:
    assert decode_manifest(encode_manifest(MANIFEST), url="x") == MANIFEST


def put(*path: str | int) -> Callable[[Any, object], None]:
    def change(record: Any, value: object) -> None:
        *parents, last = path
        for name in parents:
            record = record[name]
        record[last] = value

    return change


HOSTILE: list[tuple[Callable[[Any, object], None], list[object]]] = [
    (put("iteration"), [None, -1, True, 1.0, "5", 1 << 63, 10**400, float("nan"), float("inf"), []]),
    (put("world_size"), [None, -1, 1 << 63, "2"]),
    (put("metric"), [10**400, float("nan"), float("-inf"), "1", True, []]),
    (put("created"), [10**400, float("nan"), "now", None]),
    (
        put("keys"),
        [None, 3, ["model", "model"], ["../model"], ["/model"], [""], ["."], [7], ["a/b"], ["dataloader"], ["optim"]],
    ),
    (
        put("files"),
        [
            None,
            [],
            {"../x": {"size": 1, "crc32": None}},
            {"/x": {"size": 1, "crc32": None}},
            {"model/\ud800": {"size": 1, "crc32": None}},
        ],
    ),
    (put("files", "model/.metadata"), [None, {}, {"size": 1}, [1, None], {"size": 1 << 63, "crc32": None}]),
    (put("files", "model/.metadata", "size"), [-1, 1.0, "1", None, 10**400, True]),
    (put("files", "model/.metadata", "crc32"), [5, "xyzw0000", "-0000001", "+0000001", "0x000001", "1_000_00", "1"]),
    (put("rank_files"), [3, [], {"../x": {}}, {"model": {}}, {"": {}}]),
    (put("rank_files", "dataloader"), [3, [], {"-1": "dataloader/rank_0.pkl"}, {"01": "dataloader/rank_0.pkl"}]),
    (put("rank_files", "dataloader", "0"), [None, "../x", "model/.metadata", "model", ["dataloader/rank_0.pkl"]]),
    (put("rank_files", "dataloader", "9" * 5000), ["dataloader/rank_0.pkl"]),
    (put("versions"), [3, "x", []]),
    (put("topology"), [3, "x"]),
    (put("fingerprint"), [3, {"model": 3}, {"model": "x"}]),
    (put("schema"), [0, 2, None, "1", []]),
    (put("save_id"), [None, 3, []]),
]


@pytest.mark.parametrize(("change", "value"), [(change, value) for change, values in HOSTILE for value in values])
def test_a_manifest_that_was_edited_is_one_of_two_errors(change: Callable[[Any, object], None], value: object) -> None:
    record = json.loads(encode_manifest(MANIFEST))
    change(record, value)
    with pytest.raises((CorruptCheckpointError, UntrustedDataError)):
        decode_manifest(json.dumps(record).encode(), url="x")


def test_a_name_that_stands_there_twice_is_damage() -> None:
    text = encode_manifest(MANIFEST).decode()
    for name in ('"iteration": 5', '"model/.metadata": {"size": 3, "crc32": null}'):
        assert name in text
        with pytest.raises(CorruptCheckpointError, match="twice"):
            decode_manifest(text.replace(name, f"{name}, {name}").encode(), url="x")


def test_fields_of_a_later_version_are_passed_over() -> None:
    record = json.loads(encode_manifest(MANIFEST))
    record["of_later"] = {"a": [1]}
    assert decode_manifest(json.dumps(record).encode(), url="x") == MANIFEST
