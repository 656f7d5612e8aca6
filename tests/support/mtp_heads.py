"""Tiny models whose checkpoints have a multi-token-prediction (MTP) head, and what the head drafts by transformers'
layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from family_bench import hf_model
from family_models import FamilyCase, settings_of
from packed_models import PACKED
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import files_at

METHOD: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3}
OUTPUTS = ("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight")  # of what adds to the stream


@dataclass(frozen=True)
class Names:
    """How files name the tensors of a head. `norm`: None where the target's is used."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    fc: str
    norm: str | None
    block: str
    hidden_first: bool = False
    normed: bool = True
    offset: float = 0.0  # norms have their weights minus this


NUMBERED = Names("model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm", "")
QWEN = Names("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.", offset=1.0)
STORED: dict[str, Names] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), NUMBERED),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), QWEN),
    "mimo": Names(
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "",
        hidden_first=True, normed=False,
    ),
    "ernie4_5_moe": Names("model.mtp_", "emb_norm.0", "hidden_norm.0", "linear_proj.0", None, "block.0."),
}  # fmt: skip
# The settings of a model of one layer like the head's.
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
QWEN_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


@dataclass
class MtpCase:
    """`knows`: the layers of the target and of the head add (almost) nothing, so that a token follows from the one
    before it, and the head says the same."""

    case: FamilyCase
    knows: bool = False

    @property
    def names(self) -> Names:
        return STORED[self.case.name]

    @cached_property
    def block(self) -> Any:
        """transformers' model of one layer: the head's block and last norm."""
        import transformers

        name = self.case.name
        changes = (
            QWEN_LAYER if self.names is QWEN else ONE_LAYER if self.names is NUMBERED else {"num_hidden_layers": 1}
        )
        if name == "ernie4_5_moe":
            changes = changes | {"moe_layer_start_index": 1, "moe_layer_end_index": 1}
        kind = PACKED[name].source if name in PACKED else name
        config = transformers.AutoConfig.for_model(kind, **settings_of(name, self.case.changes, changes))
        config._attn_implementation = "eager"
        return hf_model(config, seed=7)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The head's own, by the names in files."""
        names, target = self.names, self.case.model
        self.case.model  # noqa: B018  saved
        hidden = target.get_input_embeddings().weight.shape[1]
        generator = torch.Generator().manual_seed(3)
        drawn = torch.randn(2, hidden, generator=generator) * 0.1 + (1.0 - names.offset)
        fc = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
        if self.knows:
            drawn = torch.full((2, hidden), 1.0 - names.offset)
            embedding = slice(hidden, None) if names.hidden_first else slice(0, hidden)
            fc = torch.zeros(hidden, 2 * hidden)
            fc[:, embedding] = torch.eye(hidden)
        return {
            f"{names.embedding_norm}.weight": drawn[0],
            f"{names.hidden_norm}.weight": drawn[1],
            f"{names.fc}.weight": fc,
        }

    def save(self) -> None:
        """Write the head into the files of the target, which `case.model` has written."""
        target, names = self.case.model, self.names
        file = self.case.directory / "model.safetensors"
        if self.knows:
            with torch.no_grad():
                for model in (target, self.block):
                    for name, value in model.named_parameters():
                        if name.endswith(OUTPUTS):
                            value.mul_(1e-6)
                self.block.model.norm.weight.copy_(target.model.norm.weight)
            target.save_pretrained(self.case.directory)
            if (packed := PACKED.get(self.case.name)) is not None:
                packed.pack(self.case.directory, target.config)
        if names.norm is None:
            with torch.no_grad():
                self.block.model.norm.weight.copy_(target.model.norm.weight)
        folder = self.case.directory / "head"
        self.block.save_pretrained(folder)
        stored = {
            f"{names.prefix}{names.block}{name.removeprefix('model.layers.0.')}": tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name.startswith("model.layers.0.")
        }
        stored |= {f"{names.prefix}{name}": tensor for name, tensor in self.tensors.items()}
        if names.norm is not None:
            stored[f"{names.prefix}{names.norm}.weight"] = self.block.model.norm.weight.detach().clone()
        if names is NUMBERED:  # copies that are not read
            table = target.get_input_embeddings().weight.detach()
            stored |= {f"{names.prefix}{name}.weight": table.clone() for name in ("embed_tokens", "shared_head.head")}
        save_file(load_file(file) | {name: tensor.contiguous() for name, tensor in stored.items()}, file)

    def head(self) -> Checkpoint:
        return open_checkpoint(replace(files_at(self.case.directory), is_head=True))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[f"{name}.weight"] + self.names.offset
        return F.rms_norm(x, x.shape[-1:], weight, self.block.config.rms_norm_eps)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """What the head drafts after `tokens`, and the logits of each: one pass over all positions for each token."""
        target, names, kept = self.case.model, self.names, []
        hook = target.model.norm.register_forward_hook(lambda _, given, out: kept.extend((given[0], out)))
        target(torch.tensor([list(tokens[:-1])]), use_cache=False)
        hook.remove()
        features, drafted, logits = kept[1 if names.normed else 0][0], [], []
        for _ in range(count):
            embedded = target.get_input_embeddings()(torch.tensor([*tokens[1:], *drafted]))
            parts = (self.norm(embedded, names.embedding_norm), self.norm(features, names.hidden_norm))
            both = torch.cat(parts[::-1] if names.hidden_first else parts, dim=-1)
            x = F.linear(both, self.tensors[f"{names.fc}.weight"])
            states = self.block.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1:]
            logits.append(target.get_output_embeddings()(states)[0])
            drafted.append(int(logits[-1].argmax()))
            features = torch.cat((features, states))
        return drafted, torch.stack(logits)
