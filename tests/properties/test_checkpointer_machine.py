"""Whatever is done to a run, in any order: what loads is one step, whole and bit for bit, and the one that should be.

A machine saves (by one rank or several), overwrites, crashes at any request, loads, protects, damages, adds files of
the user's own, edits the pointer and changes the number of ranks. Beside it a model in a dict says what must hold.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import dcpfs
from dcpfs.checkpointer import save_step as save_step_module
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, PROTECTED_NAME, WRITING_NAME, parse_latest, step_name
from dcpfs.config import Durability
from dcpfs.errors import CheckpointError, CheckpointExistsError, DcpfsError
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store
from dcpfs.testing.faulty import Aftermath, FaultPlan, FaultyStore, InjectedError, Moment
from tests.properties.bounds import examples
from tests.properties.thread_ranks import run_threads, thread_groups

TRANSFER = dcpfs.TransferConfig(durability=Durability.PAGE_CACHE, local_concurrency=1)
ONCE = dcpfs.RetryConfig(attempts=1)
ITERATIONS = st.integers(1, 7)
State = Literal["whole", "doubtful", "unmarked", "broken"]


@dataclass
class Step:
    """What the model knows of a step.

    Attributes:
        version: Of the save that made it.
        world_size: Number of ranks that did.
        metric: It was saved with.
        state: ``whole``; ``doubtful``: bits of a file flipped, which a load may or may not meet; ``unmarked``: its
            manifest is gone, so that only the pointer vouches for it; ``broken``: a file is missing or short.
    """

    version: int
    world_size: int
    metric: float | None = None
    state: State = "whole"


@dataclass
class Policy:
    """The rules of retention of a run."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None


@dataclass
class Model:
    """What a run must hold."""

    steps: dict[int, Step] = field(default_factory=dict)
    pointer: str | None = None
    foreign: dict[str, bytes] = field(default_factory=dict)
    protected: set[int] = field(default_factory=set)
    """From retention: also while a step can't be loaded, and when it is saved anew."""

    @property
    def named(self) -> int | None:
        return None if self.pointer is None else parse_latest(self.pointer)

    def acceptable(self) -> tuple[list[int], bool]:
        """What may be resumed from, best first; and whether the last of it certainly can be."""
        order = sorted(self.steps, reverse=True)
        if self.named in self.steps:
            order.sort(key=lambda each: each != self.named)
        found: list[int] = []
        for iteration in order:
            state = self.steps[iteration].state
            if state == "whole":
                return [*found, iteration], True
            if state == "doubtful" or (state == "unmarked" and iteration == self.named):
                found.append(iteration)
        return found, False

    def kept(self, policy: Policy, newest: int) -> set[int]:
        """Steps that retention must leave alone, after the commit of ``newest``."""
        counted = {each: step for each, step in self.steps.items() if step.state in ("whole", "doubtful")}
        passed = sorted((each for each in counted if each <= newest), reverse=True)
        kept = {newest, *(each for each in self.steps if each > newest)}
        kept |= {each for each, step in self.steps.items() if each in self.protected or step.state == "unmarked"}
        if self.named is not None:
            kept.add(self.named)
        if policy == Policy():
            return kept | counted.keys()
        kept |= set(passed[: policy.keep_last or 1])
        kept |= {each for each in passed if policy.keep_every and each % policy.keep_every == 0}
        rated = sorted(
            ((counted[each].metric, each) for each in passed if counted[each].metric is not None), reverse=True
        )
        return kept | {each for _, each in rated[: policy.keep_best or 0]}


def state_of(version: int, rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """What a rank saves: every value tells of which save it is."""
    return {
        "model": {"large": torch.full((300,), float(version)), "small": torch.full((3,), version)},
        "optim": {"exp_avg": torch.full((9,), version + 0.5), "betas": [0.9, version]},
        "dataloader": {"position": [version, rank] * 4},
        "extra": {"shared": version, f"own.{rank}": torch.full((2,), version * 10 + rank), "world": world_size},
    }


def equal(found: object, wanted: object) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and found.keys() == wanted.keys() and all(
            equal(found[key], wanted[key]) for key in wanted
        )  # fmt: skip
    return found == wanted


def reshard(states: Mapping[int, object], _: object) -> dict[str, object]:
    return {"of_all": dict(states)}


class CheckpointerMachine(RuleBasedStateMachine):
    """One run."""

    world_sizes = st.sampled_from((1, 1, 1, 2, 3))

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.run = self.folder / "run"
        self.model = Model()
        self.policy = Policy()
        self.world_size = 1
        self.version = 0
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(thread_groups())
        self.disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)

    def teardown(self) -> None:
        self.stack.close()
        logging.disable(self.disabled)
        assert self.folder.name.startswith("machine-")
        shutil.rmtree(self.folder)

    @initialize(
        policy=st.builds(
            Policy, st.sampled_from((None, 1, 1, 2)), st.sampled_from((None, None, 3)), st.sampled_from((None, None, 1))
        ),
        protects=st.sampled_from((None, 2, 4)),
        annotated=st.sampled_from((None, 2, 4)),
    )
    def begin(self, policy: Policy, protects: int | None, annotated: int | None) -> None:
        for iteration in (2, 4):  # before there is a policy
            self.save(iteration, "overwrite", float(iteration), "disabled")
        self.policy = policy
        if protects is not None:
            self.set_protection(protects, protects=True)
        if annotated is not None:
            self.put_foreign(f"{step_name(annotated)}/model/notes.txt")

    def config(self, **settings_: object) -> dcpfs.CheckpointConfig:
        return dcpfs.CheckpointConfig.model_validate(
            {
                "save_dir": str(self.run),
                "extra_keys": ("extra",),
                "rng": "none",
                "transfer": TRANSFER,
                "retry": ONCE,
                "timeout_seconds": 60.0,
                **vars(self.policy),
                **settings_,
            }
        )

    # --- saving

    def attempt_save(
        self,
        iteration: int,
        config: dcpfs.CheckpointConfig,
        metric: float | None,
        plan: FaultPlan | None,
        *,
        during: Callable[[dcpfs.DistributedCheckpointer, int], None] | None = None,
    ) -> tuple[list[BaseException], bool]:
        """What the ranks raised, and whether the fault came. ``during`` is called by each while the save may go on."""
        version, world_size = self.version + 1, self.world_size
        self.version = version
        made: list[FaultyStore] = []

        def open_wrapped(location: Location, **options: Any) -> Store:
            store = open_store(location, **options)
            if plan is None:
                return store
            made.append(FaultyStore(store, plan))
            return made[-1]

        def save(rank: int) -> None:
            with dcpfs.DistributedCheckpointer(config) as checkpointer:
                checkpointer.save_state(iteration, state_of(version, rank, world_size), metric=metric)
                if during is not None:
                    during(checkpointer, rank)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(save_step_module, "open_store", open_wrapped)
            outcomes = run_threads(save, world_size)
        errors = [each for each in outcomes if isinstance(each, BaseException)]
        assert len(errors) in (0, world_size), f"some ranks failed alone: {outcomes}"
        assert all(isinstance(error, DcpfsError) for error in errors), errors
        return errors, any(store.reached.is_set() for store in made)

    @rule(
        iteration=ITERATIONS,
        on_existing=st.sampled_from(("overwrite", "skip", "error")),
        metric=st.sampled_from((None, 0.0, 1.0, 2.0)),
        mode=st.sampled_from(("disabled", "disabled", "async")),
    )
    def save(self, iteration: int, on_existing: str, metric: float | None, mode: str) -> None:
        model, known = self.model, self.model.steps.get(iteration)
        others = [
            each
            for each, step in model.steps.items()
            if each != iteration
            and (step.state in ("whole", "doubtful") or (step.state == "unmarked" and each == model.named))
        ]
        errors, _ = self.attempt_save(iteration, self.config(on_existing=on_existing, async_mode=mode), metric, None)
        if known is None or (known.state == "broken" and on_existing != "error"):
            assert not errors, errors
        elif on_existing == "skip":
            assert not errors, errors
            return
        elif on_existing == "error" or not others:
            assert errors, f"step {iteration} was overwritten, beside {model.steps}"
            assert all(isinstance(error, CheckpointExistsError) for error in errors), errors
        else:
            assert not errors, errors
        if not errors:
            self.committed(iteration, metric)

    @rule(metric=st.sampled_from((None, 0.0, 1.0, 2.0)), mode=st.sampled_from(("disabled", "async")))
    def save_next(self, metric: float | None, mode: str) -> None:
        """As training does."""
        self.save(max(self.model.steps, default=0) + 1, "overwrite", metric, mode)

    def committed(self, iteration: int, metric: float | None, *, crashed: bool = False) -> None:
        """A new step stands; what retention may have removed is looked up."""
        model = self.model
        model.steps[iteration] = Step(self.version, self.world_size, metric)
        if not crashed:
            model.pointer = f"{step_name(iteration)}\n"
        kept = model.kept(self.policy, iteration)
        for each in list(model.steps):
            manifest = self.run / step_name(each) / MANIFEST_NAME
            if each in kept:
                assert manifest.exists() or model.steps[each].state in ("unmarked", "broken"), f"step {each} is gone"
            elif model.steps[each].state in ("whole", "doubtful") and not crashed:
                assert not manifest.exists(), f"step {each} should have made room"
            if not manifest.exists() and model.steps[each].state != "unmarked":
                del model.steps[each]

    @rule(
        iteration=ITERATIONS,
        mutation=st.integers(1, 30),
        moment=st.sampled_from(list(Moment)),
        aftermath=st.sampled_from(list(Aftermath)),
        metric=st.sampled_from((None, 3.0)),
        mode=st.sampled_from(("disabled", "disabled", "async")),
    )
    def crash(
        self, iteration: int, mutation: int, moment: Moment, aftermath: Aftermath, metric: float | None, mode: str
    ) -> None:
        plan = FaultPlan(mutation=mutation, moment=moment, aftermath=aftermath)
        errors, reached = self.attempt_save(iteration, self.config(async_mode=mode), metric, plan)
        self.after_crash(iteration, metric, errors, reached=reached)

    def after_crash(self, iteration: int, metric: float | None, errors: list[BaseException], *, reached: bool) -> None:
        """Look up what a save that failed in its middle has left: the old step, the new one, or none."""
        model, known, before = self.model, self.model.steps.get(iteration), self.model.pointer
        model.pointer = self.read_pointer()
        assert model.pointer in (before, f"{step_name(iteration)}\n")
        if errors and not reached:
            assert all(isinstance(error, CheckpointExistsError) for error in errors), errors
            return
        if not errors:
            self.committed(iteration, metric, crashed=True)
            return
        assert any(isinstance(error, (InjectedError, CheckpointError)) for error in errors), errors
        if not (self.run / step_name(iteration) / MANIFEST_NAME).exists():
            if known is None or known.state != "unmarked" or not self.still_unmarked(iteration):
                model.steps.pop(iteration, None)
            return
        # One or the other, and whole: the exact values say which.
        version, world_size = self.loaded_version(iteration) or (0, 0)
        if version == self.version:
            self.committed(iteration, metric, crashed=True)
            assert world_size == self.world_size
        else:
            assert known is not None
            assert version in (known.version, 0)
            assert version or known.state in ("doubtful", "broken")

    def still_unmarked(self, iteration: int) -> bool:
        """Nothing of a step without a manifest was touched."""
        folder = self.run / step_name(iteration)
        return (folder / "model" / ".metadata").exists() and not (folder / WRITING_NAME).exists()

    # --- loading

    def load(self, **settings_: object) -> tuple[int, int, int] | CheckpointError:
        """Iteration, version and number of ranks of what this world loads, all ranks alike; or the error."""
        config, world_size = self.config(**settings_), self.world_size

        def load(rank: int) -> tuple[int, dict[str, dict[str, Any]]]:
            parts = state_of(0, rank, 0)
            parts["extra"] = {}
            with dcpfs.DistributedCheckpointer(config, access="read_only", reshard_dataloader=reshard) as checkpointer:
                return checkpointer.load_state(parts), parts

        outcomes = run_threads(load, world_size)
        errors = [each for each in outcomes if isinstance(each, BaseException)]
        if errors:
            assert len(errors) == world_size, f"some ranks failed alone: {outcomes}"
            assert all(isinstance(error, CheckpointError) for error in errors), errors
            return errors[0]  # type: ignore[return-value]  # checked above
        found: set[tuple[int, int, int]] = set()
        for rank, outcome in enumerate(outcomes):
            assert isinstance(outcome, tuple)
            iteration, parts = outcome
            if iteration == 0:
                assert equal(parts, {**state_of(0, rank, 0), "extra": {}}), "from scratch, and something was changed"
                found.add((0, 0, 0))
                continue
            version, saved_by = parts["extra"]["shared"], parts["extra"]["world"]
            wanted = state_of(version, rank, saved_by)
            wanted["extra"].update({f"own.{each}": torch.full((2,), version * 10 + each) for each in range(saved_by)})
            if saved_by > rank:
                pass
            else:
                del wanted["extra"][f"own.{rank}"]
            if saved_by != world_size:
                positions = {each: {"position": [version, each] * 4} for each in range(saved_by)}
                wanted["dataloader"] = {"of_all": positions}
            assert equal(parts, wanted), f"a mix was loaded as {iteration} by rank {rank}: {parts} instead of {wanted}"
            found.add((iteration, version, saved_by))
        assert len(found) == 1, found
        return found.pop()

    def loaded_version(self, iteration: int) -> tuple[int, int] | None:
        """Version and number of ranks of one step; None: it can't be loaded."""
        outcome = self.load(load_step=iteration)
        if isinstance(outcome, CheckpointError):
            return None
        assert outcome[0] == iteration
        return outcome[1:]

    @rule()
    def resume(self) -> None:
        allowed, certain = self.model.acceptable()
        outcome = self.load()
        if isinstance(outcome, CheckpointError):
            # A doubtful step that was found damaged in mid-load may have changed what the next one lacks.
            fell = len(allowed) > 1 and "can't fall back" in str(outcome)
            assert not certain or fell, f"{outcome}; {allowed} could be loaded"
            return
        iteration, version, world_size = outcome
        if iteration == 0:
            assert not certain, f"{allowed} was there, and training starts from scratch"
            assert self.model.named is None
            return
        assert iteration in allowed
        step = self.model.steps[iteration]
        assert (version, world_size) == (step.version, step.world_size)

    @rule(iteration=ITERATIONS)
    def load_one(self, iteration: int) -> None:
        step = self.model.steps.get(iteration)
        found = self.loaded_version(iteration)
        if step is None or step.state == "broken":
            assert found is None
        elif found is None:
            assert step.state != "whole"
        else:
            assert found == (step.version, step.world_size)

    # --- what others do

    @rule(world_size=world_sizes)
    def change_world_size(self, world_size: int) -> None:
        self.world_size = world_size

    @precondition(lambda self: self.model.steps)
    @rule(data=st.data(), protects=st.booleans())
    def protect(self, data: st.DataObject, protects: bool) -> None:
        iteration = data.draw(st.sampled_from(sorted(self.model.steps)))
        self.set_protection(iteration, protects=protects)

    def set_protection(self, iteration: int, *, protects: bool) -> None:
        with dcpfs.DistributedCheckpointer(self.config(), access="read_only") as checkpointer:
            (checkpointer.protect if protects else checkpointer.unprotect)(iteration)
        (self.model.protected.add if protects else self.model.protected.discard)(iteration)

    @precondition(lambda self: len(self.model.steps) > 1)
    @rule(data=st.data(), way=st.sampled_from(("flip", "cut", "delete", "unmark")), at=st.integers(0, 10**6))
    def damage(self, data: st.DataObject, way: str, at: int) -> None:
        iteration = data.draw(st.sampled_from(sorted(self.model.steps)))
        step, folder = self.model.steps[iteration], self.run / step_name(iteration)
        if step.state == "unmarked":
            return
        if way == "unmark":
            (folder / MANIFEST_NAME).unlink()
            if step.state == "whole":
                step.state = "unmarked"
            else:
                # Nothing says any more what it should hold: it is left out from here on.
                shutil.rmtree(folder)
                self.forget(iteration)
            return
        files = sorted(
            path
            for path in folder.rglob("*")
            if path.is_file()
            and path.name not in (MANIFEST_NAME, PROTECTED_NAME, WRITING_NAME)
            and str(path.relative_to(self.run)) not in self.model.foreign
        )
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        content = path.read_bytes()
        if way == "flip" and content:
            changed = bytearray(content)
            changed[at % len(content)] ^= 1 << at % 8
            path.write_bytes(changed)
            step.state = "doubtful" if step.state == "whole" else step.state
        elif way == "cut" and content:
            path.write_bytes(content[: at % len(content)])
            step.state = "broken"
        elif way == "delete":
            path.unlink()
            step.state = "broken"

    def forget(self, iteration: int) -> None:
        del self.model.steps[iteration]
        self.model.protected.discard(iteration)
        start = f"{step_name(iteration)}/"
        self.model.foreign = {name: data for name, data in self.model.foreign.items() if not name.startswith(start)}

    @rule(
        name=st.sampled_from(
            (
                *("notes.txt", "backup/model/__0_0.distcp", "iter_x/manifest.json", "iter_000000005.bak/manifest.json"),
                *("iter_5/model/.metadata", "iter_0000000005/.writing", "ITER_000000005/manifest.json", ".hidden"),
            )
        )
    )
    def add_foreign_name(self, name: str) -> None:
        self.put_foreign(name)

    @precondition(lambda self: self.model.steps)
    @rule(
        data=st.data(),
        name=st.sampled_from(("readme.md", "tokenizer/vocab.json", "model/notes.txt", ".x/__0_0.distcp")),
    )
    def add_foreign_name_in_a_step(self, data: st.DataObject, name: str) -> None:
        self.put_foreign(f"{step_name(data.draw(st.sampled_from(sorted(self.model.steps))))}/{name}")

    def put_foreign(self, name: str) -> None:
        path = self.run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.model.foreign[name] = name.encode()
        path.write_bytes(self.model.foreign[name])

    @rule(
        text=st.sampled_from(
            (
                None,
                "",
                "iter_000000002\n",
                "iter_000000003",
                "iter_000000004\r\n",
                "a/iter_000000002/",
                "junk",
                "iter_9/x\n",
            )
        )
    )
    def edit_pointer(self, text: str | None) -> None:
        path = self.run / LATEST_NAME
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text, newline="")
        self.model.pointer = self.read_pointer()

    def read_pointer(self) -> str | None:
        path = self.run / LATEST_NAME
        return path.read_bytes().decode() if path.exists() else None

    # --- what always holds

    @invariant()
    def foreign_names_stay(self) -> None:
        for name, content in self.model.foreign.items():
            assert (self.run / name).read_bytes() == content, name

    @invariant()
    def steps_and_latest_agree(self) -> None:
        if not self.run.exists():
            return
        steps = self.model.steps
        with dcpfs.DistributedCheckpointer(self.config(), access="read_only") as checkpointer:
            found = set(checkpointer.steps())
            allowed, certain = self.model.acceptable()
            try:
                latest = checkpointer.latest()
            except CheckpointError:
                latest = None
        assert {each for each, step in steps.items() if step.state == "whole"} <= found
        assert found <= {each for each, step in steps.items() if step.state != "broken"}
        assert latest in allowed if certain else latest in (None, *allowed)


TestCheckpointerMachine: Any = CheckpointerMachine.TestCase
TestCheckpointerMachine.settings = settings(examples(15), stateful_step_count=14)


class _LongMachine(CheckpointerMachine):
    """The same, for longer."""


TestCheckpointerMachineForLong: Any = pytest.mark.timeout(7200)(pytest.mark.nightly(_LongMachine.TestCase))
TestCheckpointerMachineForLong.settings = settings(examples(200), stateful_step_count=30, derandomize=False)
