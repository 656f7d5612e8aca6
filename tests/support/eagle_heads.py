"""Tiny EAGLE-3 heads: random ones, and one that is right about a target whose tokens follow from the last one alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.model import EagleHead, Heads, ModelConfig, Rope
from quire.runtime.models.build import count_weights
from quire.runtime.speculation.eagle_drafter import EagleDrafter
from quire.runtime.transfer import Pending
from quire.types.step import StepPlan
from tiny_models import MemoryCheckpoint, family_checkpoint, tiny_config
from worker_executor import TinyEngine

Draft = tuple[tuple[int, ...], tuple[int, ...]]  # the tokens of a sequence, and what was drafted after them

_COMPARED = 14  # numbers of an embedding by which `knowing_head` tells tokens apart


def head_config(target: ModelConfig, layers: tuple[int, ...], *, drafted: int | None = None, **changes: Any) -> Any:
    """The config of a head for `target` that can draft so many tokens; all, where nothing is said."""
    norms_stream = changes.pop("norms_stream", False)
    values: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_layers": 1,
        "heads": Heads(num_query=4, num_kv=2, dim=16),
        "per_layer_input": target.hidden_size,
        "eagle": EagleHead(drafted or target.vocab_size, layers, norms_stream),
    }
    return tiny_config("eagle3", **(values | changes))


def random_head(config: ModelConfig, seed: int = 0) -> MemoryCheckpoint:
    found = family_checkpoint(config, seed)
    assert config.eagle is not None
    if "d2t" in found.tensors:
        ids = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(seed))[
            : config.eagle.vocab_size
        ]
        found.tensors["d2t"] = ids.sort().values - torch.arange(config.eagle.vocab_size)
    return found


def memoryless(target: MemoryCheckpoint) -> MemoryCheckpoint:
    """The target without what its layers add: a token follows from the one before it alone. The first numbers of all
    embeddings are as long as each other, and so are the others."""
    tensors = {
        name: torch.zeros_like(tensor) if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor
        for name, tensor in target.tensors.items()
    }
    table = tensors["model.embed_tokens.weight"]
    parts = (table[:, :_COMPARED], table[:, _COMPARED:])
    tensors["model.embed_tokens.weight"] = torch.cat([F.normalize(part, dim=1) for part in parts], dim=1)
    return MemoryCheckpoint(target.config, tensors)


def knowing_head(target: MemoryCheckpoint, layers: tuple[int, ...]) -> MemoryCheckpoint:
    """A head that is right about `memoryless(target)`: every token attends to tokens like itself, and the norm and head
    are the target's. It looks at no hidden state. Angles are so small that a token's place does not matter but for the
    first pair of numbers."""
    model, dim = target.config, 16
    count = model.hidden_size // dim  # heads that hold an embedding together
    heads = Heads(count, count, dim)
    config = count_weights(head_config(model, layers, heads=heads, rope=Rope(theta=1e30), norms_stream=True))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in random_head(config).tensors.items()}
    hidden, path = model.hidden_size, "layers.0"
    for name in ("input_layernorm", "post_attention_layernorm"):  # the weights of hidden_norm stay 0
        tensors[f"{path}.{name}.weight"] = torch.ones(hidden)
    embedding = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)  # of the embedding and the feature
    spread = torch.zeros(dim, hidden)
    still = [number for number in range(dim) if number % (dim // 2)]  # these do not turn
    spread[still, range(_COMPARED)] = 1.0
    same = torch.cat((spread, torch.zeros(dim, hidden)), dim=1).repeat(count, 1)
    tensors[f"{path}.self_attn.q_proj.weight"] = same * 2_000.0
    tensors[f"{path}.self_attn.k_proj.weight"] = same
    tensors[f"{path}.self_attn.v_proj.weight"] = embedding
    tensors[f"{path}.self_attn.o_proj.weight"] = torch.eye(hidden)
    tensors["norm.weight"] = target.tensors["model.norm.weight"]
    tensors["lm_head.weight"] = target.tensors["lm_head.weight"]
    return MemoryCheckpoint(config, tensors)


def record(made: TinyEngine) -> list[Draft]:
    """Every draft that a head makes for this engine; the list fills while the engine runs."""
    drafter, found = made.executor.worker.drafter, []
    assert isinstance(drafter, EagleDrafter)
    follow = drafter.follow

    def watch(plan: StepPlan, token_ids: Tensor) -> Any:
        pending = follow(plan, token_ids)
        drafts = pending.finish([tensor.cpu() for tensor in pending.tensors])
        own, target = drafter._worker.rows, drafter._target
        for draft in drafts:
            known = own.tokens[draft.row, : drafter._states[draft.row].num_final].tolist()
            found.append(((int(target.tokens[draft.row, 0]), *known), tuple(draft.token_ids.tolist())))
        return Pending((), lambda: drafts)

    drafter.follow = watch  # type: ignore[method-assign]
    return found
