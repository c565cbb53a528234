"""What a first call costs is its own: nothing is imported while the clock runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from benchmarks.settings import Target, client_environment

_SCRIPT = """
import sys

from benchmarks.contenders import Importing, Scope, find
from benchmarks.settings import Target
from benchmarks.workloads import Workload, build, specs

target = Target.model_validate_json(sys.argv[2])
contender = find(sys.argv[1])
if isinstance(contender, Importing):
    contender.import_modules(target)
state = build(specs(Workload.LLAMA, 400_000), None)
before = set(sys.modules)
contender.save(state, target)
contender.load(state, target, Scope.WHOLE)
print("imported:", *sorted(set(sys.modules) - before))
"""
_PACKAGES = {
    "aiobotocore",
    "aiohttp",
    "botocore",
    "dcpfs",
    "multistorageclient",
    "obstore",
    "s3fs",
    "s3torchconnector",
    "s3torchconnectorclient",
}


@pytest.mark.parametrize(
    "contender",
    [
        "dcpfs",
        "torch-fsspec",
        "s3torchconnector",
        pytest.param("dcpfs-obstore", marks=pytest.mark.nightly),
        pytest.param("multi-storage-client", marks=pytest.mark.nightly),
    ],
)
def test_nothing_of_a_contender_is_imported_by_its_first_call(sink: Target, contender: str) -> None:
    package = {"s3torchconnector": "s3torchconnector", "multi-storage-client": "multistorageclient"}.get(contender)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: the contender is optional")
    target = sink.child(f"imports-{contender}")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, contender, target.model_dump_json()],
        env=client_environment(target),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    late = [name for name in line.split()[1:] if name.partition(".")[0] in _PACKAGES]
    assert late == []
