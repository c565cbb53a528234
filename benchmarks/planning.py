"""What planning costs: the CPU seconds and bytes of up to 4,096 ranks, and the collectives and seconds of 2.

Problem: at scale planning, not storage, can be most of a save, and all ranks wait for one of them (case 74). It can't
be measured by saving, since nobody has 4,096 ranks at hand.

Way taken: the planning work itself, without a network. Each step of an exchange is called as a rank, or the
coordinator, would call it, in one process: plan, encode; decode all, compare, share out, encode; decode. torch is
measured in the same way, one key after the other as ``dcp.save`` takes them, with few ranks, since the objects of 1,000
don't fit in memory; its coordinator's work grows with the ranks, so it is also told per rank. No figure counts
before both have planned the same checkpoint: equal metadata, every chunk written once; so torch, with few
ranks, is first.

Beside it, two real ranks save the same kind of state, so small that planning is what they do (`planning_ranks`).

Flow: `measure` → `simulate_dcpfs`, `simulate_torch`, `save_with_ranks` → figures → `markdown`.
"""

from __future__ import annotations

import pickle
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter

from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.plan_codec import split_local_plans
from dcpfs.checkpointer.plan_table import Box, PlanTable, make_table
from dcpfs.checkpointer.step_plan import GlobalPlan, decode_assigned, encode_local_plans, plan_globally, plan_step
from dcpfs.dcp.writer import FsspecStorageWriter

from .figures import Entry, Missing
from .measuring import Cost, Meter
from .planning_states import TrainingState, as_rank, training_state
from .settings import PACKAGE_ROOT, PLACE_PREFIX, Setting, client_environment

__all__ = ["CASES", "RanksFigure", "SimulationFigure", "markdown", "measure", "save_with_ranks", "simulate_dcpfs"]

CASES = ("planning", "planning-2")
"""Names of the simulation, and of the ranks that are really there, in figures."""
_TIMES = 3
_REASON_CHARACTERS = 600
_SIMULATED = (
    "What does planning cost the ranks and the coordinator? torch plans key by key; its coordinator is measured with "
    "fewer ranks, so compare it per rank."
)
_SIMULATED_HEADINGS = (
    "contender",
    "ranks × tensors",
    "rank plans, CPU s",
    "rank sends, kB",
    "coordinator, CPU s",
    "per rank, ms",
    "its memory, MB",
    "rank receives, kB",
    "rank decodes, CPU s",
    "n",
)
_MEETING = "How often do ranks meet in one save of all keys, and how long does it take when there are next to no bytes?"
_MEETING_HEADINGS = ("contender", "save", "collectives", "seconds", "CPU s of rank 0", "planning, s", "n")


class SimulationFigure(BaseModel):
    """The planning work of many ranks, without a network.

    Attributes:
        local_cpu_seconds: Of one rank, until its plan is on the way.
        sent_bytes: By one rank to the coordinator.
        coordinator_cpu_seconds: For all ranks.
        coordinator_extra_bytes: Peak of the coordinator's memory above what it held before.
        assigned_bytes: From the coordinator to one rank.
        decode_cpu_seconds: Of one rank, until it knows what to write.
        seconds: From the coordinator's receipt of all plans to its answer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["planning-simulated"] = "planning-simulated"
    contender: str
    ranks: int
    tensors: int
    local_cpu_seconds: float
    sent_bytes: int
    coordinator_cpu_seconds: float
    coordinator_extra_bytes: int | None
    assigned_bytes: int
    decode_cpu_seconds: float
    case: str = "planning"
    setting: None = None
    repetition: int = 0
    seconds: float | None = None
    cpu_seconds: float | None = None
    """Of one rank and the coordinator together: what no other rank can do meanwhile."""
    gigabytes: None = None
    peak_bytes: int | None = None
    requests: None = None
    moved_bytes: int | None = None
    """Sent and received by one rank."""


class RanksFigure(BaseModel):
    """Saves of a state without weight by real ranks.

    Attributes:
        collectives: By rank 0 in one save.
        wall_seconds: Of the save, of rank 0.
        cpu_seconds: The same.
        plan_seconds: Of the phase in which plans are made and exchanged, where it is told.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["planning-ranks"] = "planning-ranks"
    contender: str
    ranks: int
    tensors: int
    save: Literal["first", "later"]
    collectives: int
    wall_seconds: float
    cpu_seconds: float
    plan_seconds: float | None
    case: str = "planning-2"
    setting: None = None
    repetition: int = 0
    seconds: float | None = None
    gigabytes: None = None
    peak_bytes: None = None
    requests: None = None
    moved_bytes: None = None


class UnequalPlansError(ValueError):
    """dcpfs and torch did not plan the same checkpoint, so nobody's cost says anything."""


def measure(
    *,
    ranks: int | Sequence[int],
    tensors: int,
    torch_ranks: int | Sequence[int],
    tell: Callable[[str], None],
    repetitions: int = 1,
) -> Iterator[SimulationFigure | RanksFigure | Missing]:
    """All figures of the case; they come as they are there.

    Args:
        ranks: Simulated ones; several give the cost over their number.
        tensors: Sharded ones of each rank.
        torch_ranks: The same for torch.
        tell: Shown what is being done.
        repetitions: Of everything, in turns.
    """
    ours = [ranks] if isinstance(ranks, int) else list(ranks)
    torchs = [torch_ranks] if isinstance(torch_ranks, int) else list(torch_ranks)
    gone: set[tuple[str, str]] = set()

    def attempt(
        case: str, contender: str, call: Callable[[], Iterable[SimulationFigure | RanksFigure]], repetition: int
    ) -> Iterator[SimulationFigure | RanksFigure | Missing]:
        if (case, contender) in gone:
            return
        try:
            figures = [figure.model_copy(update={"repetition": repetition}) for figure in call()]
        except Exception as error:  # noqa: BLE001 - handed over as the result
            reason = f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
            tell(f"{case}: {contender}: failed: {reason}")
            for name in ("dcpfs", "torch") if isinstance(error, UnequalPlansError) or not contender else (contender,):
                gone.add((case, name))
                entry = Entry(
                    case=case, setting=Setting.MEMORY, contender=name, repetition=repetition, place="without a store"
                )
                yield Missing(kind="failed", entry=entry, reason=reason)
            return
        yield from figures

    for repetition in range(repetitions):
        for each in torchs:
            tell(f"planning: torch #{repetition}, {each} simulated ranks")
            yield from attempt(CASES[0], "torch", lambda each=each: [simulate_torch(each, tensors)], repetition)  # type: ignore[misc] # bound at once
        for each in ours:
            tell(f"planning: dcpfs #{repetition}, {each} simulated ranks of {tensors} tensors")
            yield from attempt(CASES[0], "dcpfs", lambda each=each: [simulate_dcpfs(each, tensors)], repetition)  # type: ignore[misc] # bound at once
        tell(f"planning #{repetition}: 2 ranks")
        yield from attempt(CASES[1], "", lambda: save_with_ranks(tensors), repetition)


# --- simulated


def simulate_dcpfs(ranks: int, tensors: int) -> SimulationFigure:
    """One exchange of all keys. Ranks 0 and the last really plan; what the others send follows from their boxes."""
    first, local = _plan_rank(0, ranks, tensors)
    last, _ = _plan_rank(ranks - 1, ranks, tensors)
    sent = _messages(first, ranks)
    if sent[-1] != encode_local_plans(last) or sent[0] != encode_local_plans(first):
        raise ValueError("a simulated rank does not send what a real one would")
    writers: dict[str, StorageWriter] = {key: _Nowhere("/nowhere") for key in first.keys}
    with Meter() as meter:
        planned = plan_globally(sent, writers)
    decoding = _least(lambda: decode_assigned(planned.assigned[-1], last))
    _prove(planned, ranks)
    return SimulationFigure(
        contender="dcpfs",
        ranks=ranks,
        tensors=tensors,
        local_cpu_seconds=local.cpu_seconds,
        sent_bytes=len(sent[-1]),
        coordinator_cpu_seconds=meter.cost.cpu_seconds,
        coordinator_extra_bytes=meter.cost.peak_extra_bytes,
        assigned_bytes=len(planned.assigned[-1]),
        decode_cpu_seconds=decoding.cpu_seconds,
        seconds=meter.cost.ended_seconds - meter.cost.began_seconds,
        cpu_seconds=local.cpu_seconds + meter.cost.cpu_seconds + decoding.cpu_seconds,
        peak_bytes=meter.cost.peak_extra_bytes,
        moved_bytes=len(sent[-1]) + len(planned.assigned[-1]),
    )


def simulate_torch(ranks: int, tensors: int) -> SimulationFigure:
    """The exchanges of ``dcp.save``, key by key. All ranks really plan."""
    sent: list[dict[str, bytes]] = []
    steps: list[LocalStep] = []
    local = None
    for rank in range(ranks):
        with as_rank(rank, ranks) as mesh:
            state = training_state(mesh, tensors)
            if rank == ranks - 1:
                local = _least(lambda state=state: _plan_with_torch(state))  # type: ignore[misc]  # bound at once
            sent.append(_plan_with_torch(state))
            steps.append(plan_step(1, state, world_size=ranks))
    if local is None:
        raise ValueError("there are no ranks")
    contents: dict[str, Metadata] = {}
    assigned: list[dict[str, bytes]] = [{} for _ in sent]
    with Meter() as meter:
        for key in sent[0]:
            plans = [pickle.loads(each[key]) for each in sent]
            final, contents[key] = DefaultSavePlanner().create_global_plan(plans)
            for mine, plan in zip(assigned, final, strict=True):
                mine[key] = pickle.dumps(plan)
    decoding = _least(lambda: [pickle.loads(each) for each in assigned[-1].values()])
    _prove_equal(steps, contents, [[pickle.loads(each[key]) for each in assigned] for key in contents])
    return SimulationFigure(
        contender="torch",
        ranks=ranks,
        tensors=tensors,
        local_cpu_seconds=local.cpu_seconds,
        sent_bytes=sum(map(len, sent[-1].values())),
        coordinator_cpu_seconds=meter.cost.cpu_seconds,
        coordinator_extra_bytes=meter.cost.peak_extra_bytes,
        assigned_bytes=sum(map(len, assigned[-1].values())),
        decode_cpu_seconds=decoding.cpu_seconds,
        seconds=meter.cost.ended_seconds - meter.cost.began_seconds,
        cpu_seconds=local.cpu_seconds + meter.cost.cpu_seconds + decoding.cpu_seconds,
        peak_bytes=meter.cost.peak_extra_bytes,
        moved_bytes=sum(map(len, [*sent[-1].values(), *assigned[-1].values()])),
    )


class _Nowhere(FsspecStorageWriter):
    """Plans and writes nothing."""

    def _make_way(self) -> None:
        """Nothing stands there."""


def _plan_rank(rank: int, ranks: int, tensors: int) -> tuple[LocalStep, Cost]:
    with as_rank(rank, ranks) as mesh:
        state = training_state(mesh, tensors)
        cost = _least(lambda: encode_local_plans(plan_step(1, state, world_size=ranks)))
        return plan_step(1, state, world_size=ranks), cost


def _plan_with_torch(state: TrainingState) -> dict[str, bytes]:
    encoded = {}
    for key, each in state.items():
        planner = DefaultSavePlanner()
        planner.set_up_planner(each)
        encoded[key] = pickle.dumps(planner.create_local_plan())
    return encoded


def _messages(step: LocalStep, ranks: int) -> list[bytes]:
    """What each rank sends, from what rank 0 does: the other rows of each tensor, the random state of the rank."""
    sent = split_local_plans(encode_local_plans(step))
    parts = {key: (make_table(each.plan), sent[key]) for key, each in step.keys.items()}
    messages = []
    for rank in range(ranks):
        message = {}
        for key, ((table, boxes), encoded) in parts.items():
            data = encoded.table
            if key == "trainer":
                data = zlib.compress(zlib.decompress(data).replace(b"rank_0", f"rank_{rank}".encode()), 1)
            own = [_rows_of(table, slot, box, rank, ranks) for slot, box in enumerate(boxes)]
            message[key] = (data, zlib.compress(table.encode_boxes(own), 1), encoded.values, encoded.storage_data)
        messages.append(pickle.dumps(message, protocol=5))
    return messages


def _rows_of(table: PlanTable, slot: int, box: Box, rank: int, ranks: int) -> Box:
    kind = table.kinds[table.slot_kinds[slot]]
    if box is None or kind.size is None or kind.type.name != "SHARD":
        return box
    rows = kind.size[0]
    each = -(-rows // ranks)
    start, stop = min(rank * each, rows), min((rank + 1) * each, rows)
    offsets = torch.Size([start, *box.offsets[1:]])
    return ChunkStorageMetadata(offsets, torch.Size([stop - start, *box.sizes[1:]]))


def _prove(planned: GlobalPlan, ranks: int) -> None:
    """Raise unless every chunk has exactly one writer."""
    for key, layout in planned.layouts.items():
        chunks = sum(len(getattr(each, "chunks", (each,))) for each in layout.stored.values())
        written = 0
        for rank in range(ranks):
            seats = layout.item_seats[layout.rank_tables[rank]]
            places = layout.places[rank]
            written += sum(not places[seat] & 1 for seat in seats) + len(planned.kept[key][rank])
        if written != chunks:
            raise ValueError(f"{key}: {chunks} chunks are listed, and {written} would be written")


def _prove_equal(
    steps: Sequence[LocalStep], contents: dict[str, Metadata], final: Sequence[Sequence[SavePlan]]
) -> None:
    """Raise unless dcpfs, of the same ranks, makes the metadata that torch makes, and shares out the same chunks."""
    writers: dict[str, StorageWriter] = {key: _Nowhere("/nowhere") for key in contents}
    planned = plan_globally([encode_local_plans(step) for step in steps], writers)
    assigned = [decode_assigned(data, step) for data, step in zip(planned.assigned, steps, strict=True)]
    for (key, metadata), theirs in zip(planned.metadata().items(), final, strict=True):
        if metadata.state_dict_metadata != contents[key].state_dict_metadata:
            raise UnequalPlansError(f"{key}: dcpfs and torch don't make the same metadata")
        written = sorted(str(item.index) for mine in assigned for item in mine[key].items)
        expected = sorted(str(item.index) for plan in theirs for item in plan.items)
        if [text.split(", index=")[0] for text in written] != [text.split(", index=")[0] for text in expected]:
            raise UnequalPlansError(f"{key}: dcpfs and torch don't write the same chunks")


def _least(call: Callable[[], object]) -> Cost:
    """The cheapest of some calls: the others have met a neighbour."""
    costs = []
    for _ in range(_TIMES):
        with Meter() as meter:
            call()
        costs.append(meter.cost)
    return min(costs, key=lambda cost: cost.cpu_seconds)


# --- real ranks


def save_with_ranks(tensors: int, timeout_seconds: float = 600) -> list[RanksFigure]:
    """Two processes save with each contender, twice: the second time plans may be remembered."""
    with tempfile.TemporaryDirectory(prefix=PLACE_PREFIX) as directory:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.planning_ranks", directory, str(rank), "2", str(tensors)],
                stdout=subprocess.PIPE,
                cwd=PACKAGE_ROOT,
                env=client_environment(),
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=timeout_seconds)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, process in enumerate(processes):
            if process.returncode:
                raise RuntimeError(f"rank {rank} of the planning case ended with {process.returncode}")
        return [RanksFigure.model_validate_json(line) for line in outputs[0].splitlines()]


# --- report


def markdown(results: Iterable[SimulationFigure | RanksFigure | Missing]) -> str:
    """The tables of the case: medians, and of the coordinator's and the save's seconds the range as well."""
    results = list(results)
    lines = ["### planning, simulated", "", _SIMULATED, "", _row(_SIMULATED_HEADINGS), _row(["---"] * 10)]
    simulated: dict[tuple[str, int, int], list[SimulationFigure]] = {}
    met: dict[tuple[str, str], list[RanksFigure]] = {}
    gone = {(each.entry.case, each.entry.contender): each for each in results if isinstance(each, Missing)}
    for each in results:
        if isinstance(each, SimulationFigure) and (CASES[0], each.contender) not in gone:
            simulated.setdefault((each.contender, each.ranks, each.tensors), []).append(each)
        if isinstance(each, RanksFigure) and (CASES[1], each.contender) not in gone:
            met.setdefault((each.contender, each.save), []).append(each)
    for (contender, ranks, tensors), own in simulated.items():
        memory = [each.coordinator_extra_bytes / 1e6 for each in own if each.coordinator_extra_bytes is not None]
        lines.append(
            _row(
                [
                    contender,
                    f"{ranks} × {tensors}",
                    _median([each.local_cpu_seconds for each in own], "{:.3f}"),
                    _median([each.sent_bytes / 1e3 for each in own], "{:.1f}"),
                    _spread([each.coordinator_cpu_seconds for each in own], "{:.2f}"),
                    _median([each.coordinator_cpu_seconds / each.ranks * 1e3 for each in own], "{:.2f}"),
                    _median(memory, "{:.0f}"),
                    _median([each.assigned_bytes / 1e3 for each in own], "{:.1f}"),
                    _median([each.decode_cpu_seconds for each in own], "{:.3f}"),
                    str(len(own)),
                ]
            )
        )
    lines += [_missing_row(each, 10) for each in gone.values() if each.entry.case == CASES[0]]
    lines += ["", "### planning, 2 ranks", "", _MEETING, "", _row(_MEETING_HEADINGS), _row(["---"] * 7)]
    for (contender, save), turns in met.items():
        lines.append(
            _row(
                [
                    contender,
                    save,
                    _median([each.collectives for each in turns], "{:.0f}"),
                    _spread([each.wall_seconds for each in turns], "{:.2f}"),
                    _median([each.cpu_seconds for each in turns], "{:.2f}"),
                    _median([each.plan_seconds for each in turns if each.plan_seconds is not None], "{:.3f}"),
                    str(len(turns)),
                ]
            )
        )
    lines += [_missing_row(each, 7) for each in gone.values() if each.entry.case == CASES[1]]
    return "\n".join([*lines, ""])


def _missing_row(missing: Missing, columns: int) -> str:
    reason = missing.reason.replace("|", "/").replace("\n", " ")
    return _row([missing.entry.contender, f"{missing.kind}: {reason}", *[""] * (columns - 2)])


def _median(values: Sequence[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else "–"


def _spread(values: Sequence[float], form: str) -> str:
    middle = _median(values, form)
    return middle if len(values) == 1 else f"{middle} ({form.format(min(values))}–{form.format(max(values))})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
