"""Contenders of the cases about steps that are fast and wrong, each in its own way."""

from __future__ import annotations

from benchmarks.contenders.step_directories import DcpfsAllSteps, DcpfsNewest, DcpfsRetention, RecursiveDelete
from benchmarks.contenders.trainers import DcpfsSync
from benchmarks.files import filesystem_of
from benchmarks.settings import Target
from benchmarks.training import Training
from benchmarks.workloads import local

# --- who looks for steps


class FindsAnOlderOne(DcpfsNewest):
    def seek(self, target: Target) -> tuple[int, ...]:
        return (super().seek(target)[0] - 1,)


class FindsNone(DcpfsNewest):
    def seek(self, target: Target) -> tuple[int, ...]:
        return ()


class OverlooksOne(DcpfsAllSteps):
    def seek(self, target: Target) -> tuple[int, ...]:
        return super().seek(target)[1:]


class NoSeeker(DcpfsNewest):
    def available(self) -> str | None:
        return "not installed here"

    def seek(self, target: Target) -> tuple[int, ...]:
        raise AssertionError("an absent contender was run")


# --- who removes them


class RemovesNothing(DcpfsRetention):
    def remove_all_but(self, target: Target, keep: int, steps: tuple[int, ...]) -> None:
        pass


class RemovesOneTooMany(RecursiveDelete):
    def remove_all_but(self, target: Target, keep: int, steps: tuple[int, ...]) -> None:
        super().remove_all_but(target, keep - 1, steps)


class RemovesPartOfAKeptOne(DcpfsRetention):
    def remove_all_but(self, target: Target, keep: int, steps: tuple[int, ...]) -> None:
        super().remove_all_but(target, keep, steps)
        filesystem, root = filesystem_of(target)
        filesystem.rm(f"{root}/iter_{steps[-2]:09d}/model/.metadata")


class TouchesAKeptOne(DcpfsRetention):
    def remove_all_but(self, target: Target, keep: int, steps: tuple[int, ...]) -> None:
        super().remove_all_but(target, keep, steps)
        filesystem, root = filesystem_of(target)
        name = f"{root}/iter_{steps[-1]:09d}/manifest.json"
        content = bytearray(filesystem.cat_file(name))
        content[-2] ^= 1
        filesystem.pipe_file(name, bytes(content))


class LeavesFilesBehind(RecursiveDelete):
    def remove_all_but(self, target: Target, keep: int, steps: tuple[int, ...]) -> None:
        filesystem, root = filesystem_of(target)
        for step in steps[:-keep]:
            filesystem.rm(f"{root}/iter_{step:09d}/manifest.json")


# --- who saves the state of a trainer


class LoadsNothing(DcpfsSync):
    def load(self, training: Training) -> int:
        return 1


class SaysAnotherStep(DcpfsSync):
    def load(self, training: Training) -> int:
        return super().load(training) + 1


class ForgetsTheMoments(DcpfsSync):
    def load(self, training: Training) -> int:
        before = {key: dict(each) for key, each in training.optimizer.state.items()}
        moments = {key: each["exp_avg"].clone() for key, each in before.items()}
        found = super().load(training)
        for key, each in training.optimizer.state.items():
            each["exp_avg"].copy_(moments[key])
        return found


class FlipsOneBit(DcpfsSync):
    def save(self, training: Training, iteration: int) -> None:
        import torch

        (parameter, *_) = training.model.parameters()
        local(parameter.detach()).reshape(-1).view(torch.uint8)[5] ^= 1
        super().save(training, iteration)


class ForgetsThePlaceInTheData(DcpfsSync):
    def load(self, training: Training) -> int:
        before = dict(training.dataloader)
        found = super().load(training)
        training.dataloader.update(before)
        return found


class ForgetsTheScheduler(DcpfsSync):
    def load(self, training: Training) -> int:
        before = training.scheduler.last_epoch
        found = super().load(training)
        training.scheduler.last_epoch = before
        return found


class ReleasesBeforeItHasCopied(DcpfsSync):
    """Training waits for nothing, and what is saved is whatever the state is by then."""

    def save(self, training: Training, iteration: int) -> None:
        self._later = (training, iteration)

    def finish(self) -> None:
        super().save(*self._later)


class NoCheckpointer(DcpfsSync):
    def available(self) -> str | None:
        return "not installed here"

    def open(self, target: Target) -> None:
        raise AssertionError("an absent contender was run")
