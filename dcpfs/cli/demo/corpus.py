"""The demo's text: the documentation strings of Python's standard library, real English that every machine has."""

from __future__ import annotations

import importlib
import inspect

import torch

from dcpfs.cli.demo.encoder import pretrained_directory

__all__ = ["Corpus"]

_MODULES = (
    "argparse",
    "asyncio",
    "collections",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "email",
    "fractions",
    "functools",
    "heapq",
    "inspect",
    "json",
    "logging",
    "math",
    "pickle",
    "random",
    "re",
    "socket",
    "statistics",
    "string",
    "subprocess",
    "tempfile",
    "textwrap",
    "threading",
    "unittest",
    "zipfile",
)


class Corpus:
    """Tokenised text, cut into batches that depend on nothing but step and seed."""

    def __init__(self, length: int = 64, batch: int = 8) -> None:
        from tokenizers import Tokenizer

        self.length, self.batch = length, batch
        tokenizer = Tokenizer.from_file(str(pretrained_directory() / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        mask_id = tokenizer.token_to_id("[MASK]")
        if mask_id is None:
            raise ValueError("the tokenizer has no [MASK]")
        self.mask_id = mask_id
        self.tokens = torch.tensor(tokenizer.encode(_text(), add_special_tokens=False).ids)

    def masked_batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids with 15 % masked (the share BERT was trained with), and labels: two (batch, length) tensors."""
        generator = torch.Generator().manual_seed(1000 + step)
        starts = torch.randint(0, len(self.tokens) - self.length, (self.batch,), generator=generator)
        labels = torch.stack([self.tokens[start : start + self.length] for start in starts.tolist()])
        masked = torch.rand(labels.shape, generator=generator) < 0.15
        masked[:, 0] = True  # never an empty loss
        return labels.masked_fill(masked, self.mask_id), labels.masked_fill(~masked, -100)


def _text() -> str:
    pieces = []
    for name in _MODULES:
        module = importlib.import_module(name)
        members = [
            value for _, value in inspect.getmembers(module) if inspect.isclass(value) or inspect.isfunction(value)
        ]
        pieces += [inspect.getdoc(item) or "" for item in (module, *members)]
    return "\n\n".join(pieces)
