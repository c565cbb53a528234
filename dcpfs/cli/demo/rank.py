"""One rank of the demo: ``python -m dcpfs.cli.demo.rank``, its job as JSON on standard input.

Events go to standard output, one JSON object a line, so that the parent acts on what happened and never on time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcpfs
from dcpfs.cli.demo.corpus import Corpus
from dcpfs.cli.demo.encoder import load_pretrained
from dcpfs.cli.demo.torch_reader import fingerprints

__all__ = ["Job", "main"]


@dataclass(frozen=True)
class Job:
    """What one rank is to do.

    Attributes:
        role: ``train`` (to the last step without a save), ``save`` (train and save until killed), ``resume`` (load, go
            on to the last step) or ``check`` (load only).
        rank: This rank.
        world_size: Number of ranks.
        rendezvous: File that the ranks meet at.
        url: The ``save_dir``.
        save_every: Steps from save to save.
        killed_save: The step in whose save the job is killed.
        last_step: The last step whose loss is compared.
        storage_options: For the URL.
    """

    role: str
    rank: int
    world_size: int
    rendezvous: str
    url: str
    save_every: int
    killed_save: int
    last_step: int
    storage_options: dict[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        """Encode for the child's standard input."""
        return json.dumps(asdict(self))


class _Announcer:
    """Says when a save begins to read the state: the parent kills the job there."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_save_checkpoint(self, model_parts: Sequence[nn.Module], state_dict: MutableMapping[str, object]) -> None:
        del model_parts
        trainer = state_dict["trainer"]
        if isinstance(trainer, MutableMapping) and trainer["iteration"] == self._step:
            emit("saving", step=self._step)


class _Run:
    """Model, optimizer, scheduler and corpus of one rank, sharded by FSDP2 over the world."""

    def __init__(self, job: Job) -> None:
        self.job = job
        model = load_pretrained()
        mesh = init_device_mesh("cpu", (job.world_size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model: nn.Module = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.corpus = Corpus()
        self.position = {"next_step": 1}

    def train_step(self) -> None:
        """Train on this rank's next batch, and report the mean loss."""
        step = self.position["next_step"]
        tokens, labels = self.corpus.masked_batch(step * self.job.world_size + self.job.rank)
        loss = self.model(tokens, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.position["next_step"] = step + 1
        mean = loss.detach()
        dist.all_reduce(mean)
        emit("step", step=step, loss=float(mean) / self.job.world_size)

    def checkpointer(self) -> dcpfs.DistributedCheckpointer:
        """The checkpointer of this job: saves in the background, keeps two steps."""
        config = dcpfs.CheckpointConfig(
            save_dir=self.job.url,
            storage_options=self.job.storage_options,
            async_mode=dcpfs.AsyncMode.ASYNC_WITH_PINNED_MEM,
            keep_last=2,
            on_world_size_change=dcpfs.WorldSizePolicy.SKIP,  # `check` loads with another number of ranks
        )
        return dcpfs.DistributedCheckpointer(
            config,
            callbacks=[_Announcer(self.job.killed_save)],
            access=dcpfs.Access.READ_WRITE if self.job.role == "save" else dcpfs.Access.READ_ONLY,
        )

    def load(self, checkpointer: dcpfs.DistributedCheckpointer) -> int:
        """Resume; returns the iteration."""
        iteration = checkpointer.load(self.model, self.optimizer, self.scheduler, dataloader=self.position)
        report = checkpointer.last_load
        if report is not None:
            emit("transfer", seconds=report.seconds, bytes=report.moved_bytes, requests=report.requests)
        return iteration

    def report_fingerprints(self, step: int) -> None:
        """Report what every tensor of model and optimizer holds after a step."""
        model = dcpfs.ModelWrapper(self.model).state_dict()
        optim = dcpfs.OptimizersWrapper(self.model, self.optimizer).state_dict()
        digests = {
            **{f"model/{key}": value for key, value in fingerprints(model).items()},
            **{f"optim/{key}": value for key, value in fingerprints(optim).items()},
        }
        if self.job.rank == 0:
            emit("fingerprints", step=step, digests=digests)


def emit(event: str, **values: object) -> None:
    """Write one event line."""
    print(json.dumps({"event": event, **values}), flush=True)  # noqa: T201 - the parent reads it


def _train(run: _Run) -> None:
    """The run that nobody interrupts; what it holds after each step that another run saves is reported."""
    while run.position["next_step"] <= run.job.last_step:
        run.train_step()
        step = run.position["next_step"] - 1
        if step % run.job.save_every == 0:
            run.report_fingerprints(step)


def _save(run: _Run) -> None:
    """Train and save in the background; the parent kills the job in the save of ``killed_save``."""
    with run.checkpointer() as checkpointer:
        if run.load(checkpointer) != 0:
            raise RuntimeError(f"there are steps at {run.job.url} already, although the demo has removed its own")
        while True:
            run.train_step()
            step = run.position["next_step"] - 1
            if step % run.job.save_every == 0:
                checkpointer.save(
                    run.model, run.optimizer, run.scheduler, None, step, dataloader=run.position, metric=float(step)
                )
                report = checkpointer.last_save
                if report is not None:
                    emit("transfer", seconds=report.seconds, bytes=report.bytes_written, requests=report.requests)
            checkpointer.maybe_wait_for_staging()


def _resume(run: _Run) -> None:
    with run.checkpointer() as checkpointer:
        iteration = run.load(checkpointer)
    emit("resumed", step=iteration)
    run.report_fingerprints(iteration)
    if run.job.role == "resume":
        if run.position != {"next_step": iteration + 1}:
            raise RuntimeError(f"the dataloader's position came back as {run.position!r}")
        _train(run)


def main() -> None:
    """Run the job from standard input."""
    job = Job(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(1)  # several ranks share the machine, and one thread sums in one order
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{job.rendezvous}", rank=job.rank, world_size=job.world_size)
    run = _Run(job)
    {"train": _train, "save": _save, "resume": _resume, "check": _resume}[job.role](run)
    emit("done")
    sys.stdin.read()  # until the parent ends this process, or is gone
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
