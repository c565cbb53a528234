"""One rank of the demo: ``python -m dcpfs.cli.demo.rank``, its job as JSON on standard input.

Events go to standard output, one JSON object a line, so that the parent acts on what happened and never on time.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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
        role: ``train`` (from the pretrained weights, save, go on until killed), ``resume`` (load, go on) or
            ``check`` (load only).
        rank: This rank.
        world_size: Number of ranks.
        rendezvous: File that the ranks meet at.
        url: The checkpoint.
        storage_options: For the URL.
        save_step: The step after which the state is saved.
        last_step: The last step whose loss is compared.
    """

    role: str
    rank: int
    world_size: int
    rendezvous: str
    url: str
    save_step: int
    last_step: int
    storage_options: dict[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        """Encode for the child's standard input."""
        return json.dumps(asdict(self))


class _Run:
    """Model, optimizer and corpus of one rank, sharded by FSDP2 over the world."""

    def __init__(self, job: Job) -> None:
        self.job = job
        model = load_pretrained()
        mesh = init_device_mesh("cpu", (job.world_size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model: nn.Module = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.corpus = Corpus()

    def state(self) -> dict[str, object]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def train_step(self, step: int) -> float:
        tokens, labels = self.corpus.masked_batch(step * self.job.world_size + self.job.rank)
        loss = self.model(tokens, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        return float(mean) / self.job.world_size

    def save(self) -> None:
        state: dict[str, object] = {**self.state(), "trainer": {"step": self.job.save_step}}
        report = dcpfs.save(state, self.job.url, storage_options=self.job.storage_options, overwrite=True)
        emit("transfer", seconds=report.seconds, bytes=report.bytes_written, requests=report.requests)

    def load(self) -> None:
        state: dict[str, object] = {**self.state(), "trainer": {"step": -1}}
        report = dcpfs.load(state, self.job.url, storage_options=self.job.storage_options)
        emit("transfer", seconds=report.seconds, bytes=report.moved_bytes, requests=report.requests)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],  # type: ignore[arg-type]  # the dicts that get_state_dict made
            optim_state_dict=state["optim"],  # type: ignore[arg-type]
        )
        if state["trainer"] != {"step": self.job.save_step}:
            raise RuntimeError(f"the trainer state came back as {state['trainer']!r}")

    def report_fingerprints(self) -> None:
        digests = fingerprints(self.state())
        if self.job.rank == 0:
            emit("fingerprints", digests=digests)


def emit(event: str, **values: object) -> None:
    """Write one event line."""
    print(json.dumps({"event": event, **values}), flush=True)  # noqa: T201 - the parent reads it


def main() -> None:
    """Run the job from standard input."""
    job = Job(**json.load(sys.stdin))
    torch.set_num_threads(1)  # several ranks share the machine, and one thread sums in one order
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{job.rendezvous}", rank=job.rank, world_size=job.world_size)
    run = _Run(job)
    if job.role == "train":
        for step in range(1, job.save_step + 1):
            emit("step", step=step, loss=run.train_step(step))
        run.save()
    else:
        run.load()
    run.report_fingerprints()
    if job.role != "check":
        for step in range(job.save_step + 1, job.last_step + 1):
            emit("step", step=step, loss=run.train_step(step))
    emit("done")
    if job.role == "train":
        step = job.last_step
        while True:  # the parent kills the job in the middle of this
            step += 1
            run.train_step(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
