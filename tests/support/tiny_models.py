"""Tiny random models as transformers makes them, the same as Quire sees them, and a hand-driven worker for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from devices import DEVICE
from quire.config.adapters import AdapterConfig
from quire.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from quire.config.kv_cache import PLAIN, KVGroups, lay_out, stored_specs
from quire.config.memory import state_groups
from quire.config.model import CpuWeights, Heads, ModelConfig, Quantization, Rope
from quire.config.policy import PolicyName
from quire.config.tiers import EvictionName, TierConfig
from quire.config.vision import ImageLimits
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.row_programs import RowKernel
from quire.runtime.loading.weights import load_weights
from quire.runtime.models.build import build_model, count_weights, describe_weights
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.reports import NO_REPORT, Report
from quire.runtime.sampling.samples import Samples
from quire.runtime.worker.adapters import make_adapters
from quire.runtime.worker.worker import Worker
from quire.types.adapters import NO_ADAPTER, AdapterPlacement
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import (
    BlockCopy,
    Chunk,
    LogprobTable,
    Masks,
    NewRow,
    RowTokens,
    StateMove,
    StepPlan,
    StepResult,
)

VOCAB = 97


@dataclass
class MemoryCheckpoint:
    """A Checkpoint whose tensors are in memory."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    file: str = "memory"
    reads: list[str] = field(default_factory=list)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read_quantized(self, name: str, region: Any = None) -> None:
        return None

    def read(self, name: str, own: Any = None) -> Tensor:
        self.reads.append(name)
        return self.tensors[name]

    def source(self, name: str) -> str:
        return self.file

    def close(self) -> None:
        self.tensors = {}


def tiny_config(architecture: str = "llama", **changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": architecture,
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 3,
        "heads": Heads(num_query=6, num_kv=2, dim=16),
        "rope": Rope(),
        "norm_eps": 1e-5,
        "qkv_bias": architecture == "qwen2",
        "qk_norm": architecture == "qwen3",
        "dtype": "float32",
    }
    return count_weights(ModelConfig(**(values | changes)))  # type: ignore[arg-type]


def transformers_model(config: ModelConfig, seed: int = 0) -> torch.nn.Module:
    """The same model as transformers builds it, with random weights (biases and norms too)."""
    import transformers

    rope = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta, **dict(config.rope.scaling)}
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads.num_query,
        "num_key_value_heads": config.heads.num_kv,
        "head_dim": config.heads.dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.rope.max_position,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attn_implementation": "eager",
    }
    kinds = {
        "llama": ("LlamaConfig", {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}),
        "mistral": ("MistralConfig", {"sliding_window": None}),
        "qwen2": ("Qwen2Config", {}),
        "qwen3": ("Qwen3Config", {}),
    }
    name, extra = kinds[config.architecture]
    hf_config = getattr(transformers, name)(**common, **extra)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.normal_(1.0 if "norm" in key else 0.0, 0.15, generator=generator)
    return model


def checkpoint_of(model: torch.nn.Module, config: ModelConfig) -> MemoryCheckpoint:
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return MemoryCheckpoint(config, tensors)


def random_checkpoint(config: ModelConfig, seed: int = 0) -> MemoryCheckpoint:
    """Random weights under Hugging Face names, without transformers."""
    heads, hidden, inner = config.heads, config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (heads.query_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (heads.kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (heads.kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, heads.query_size, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for path in (f"model.layers.{layer}" for layer in range(config.num_layers)):
        shapes |= {f"{path}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{path}.{name}.weight": (rows, columns) for name, (rows, columns, _) in linears.items()}
        shapes |= {f"{path}.{name}.bias": (rows,) for name, (rows, _, biased) in linears.items() if biased}
        if config.qk_norm:
            shapes |= {f"{path}.self_attn.{kind}_norm.weight": (heads.dim,) for kind in "qk"}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    return MemoryCheckpoint(config, {name: t + 1.0 if "norm" in name else t for name, t in tensors.items()})


def family_checkpoint(config: ModelConfig, seed: int = 0) -> MemoryCheckpoint:
    """Random weights of any family, whose layers say what they are called."""
    generator = torch.Generator().manual_seed(seed)
    shapes = describe_weights(config).items()
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes}
    return MemoryCheckpoint(config, {name: t + 1.0 if "norm" in name else t for name, t in tensors.items()})


def engine_config(
    *,
    block_size: int = 4,
    num_blocks: int = 128,
    rows: int = 8,
    max_len: int = 256,
    dtype: str = "float32",
    device: str = DEVICE,
    layout: Literal["paged", "virtual"] = "paged",
    tiers: TierConfig | None = None,
    budget: int = 2_048,
    kv_dtype: str | None = None,
    quantization: Quantization | None = None,
    groups: KVGroups = PLAIN,
    images: ImageLimits | None = None,
    adapters: AdapterConfig | None = None,
    cpu_weights: CpuWeights = "integer",
    policy: PolicyName = "fcfs",
    eviction: EvictionName = "lru",
) -> EngineConfig:
    return EngineConfig(
        CacheConfig(
            block_size, num_blocks, layout=layout, tiers=tiers or TierConfig(), groups=groups, eviction=eviction
        ),
        SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=max_len,
            policy=policy,
            images=images,
            adapter_slots=0 if adapters is None else adapters.slots,
            preemption="auto" if tiers is None or not tiers.enabled else "swap",  # "auto" depends on measured times
        ),
        DeviceConfig(device, dtype, kv_dtype or dtype, quantization=quantization, cpu_weights=cpu_weights),  # type: ignore[arg-type]
        adapters=adapters,
    )


def backend_for(model: ModelConfig, attention: str) -> str:
    """The attention backend of a model. On a GPU "auto" is Triton, whose kernels do not attend to chosen tokens."""
    return "gather" if attention == "auto" and DEVICE != "cpu" and model.indexer is not None else attention


def with_states(config: EngineConfig, model: ModelConfig, spare: int = 8) -> EngineConfig:
    """With room for a state of each row, and some more, where the model has recurrent layers."""
    if model.recurrent is None:
        return config
    count, cache = config.scheduler.num_rows + spare, config.cache
    return replace(
        config, cache=replace(cache, groups=state_groups(model, config.device.kv_dtype, cache.block_size, count))
    )


def with_windows(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """With blocks of their own for layers with a window, where there are others too, and as many blocks more."""
    layout = lay_out(stored_specs(model.kv_specs, config.device.kv_dtype), split=True)
    if layout.window is None:
        return config
    groups = replace(
        config.cache.groups, window=layout.window, num_window_blocks=layout.num_window_blocks,
        is_chunked=model.has_chunks,
    )  # fmt: skip
    num_blocks = config.cache.num_blocks * (1 + layout.num_window_blocks)
    return replace(config, cache=replace(config.cache, groups=groups, num_blocks=num_blocks))


@dataclass(frozen=True)
class Greedy:
    token_ids: Tensor
    report: Report = NO_REPORT


class GreedySampler:
    """Argmax; keeps the logits it was shown. Rows whose seed is in `broken` raise when added."""

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.rows: set[int] = set()
        self.seen: dict[int, list[Tensor]] = {}
        self._broken = broken

    def add(self, new: NewRow) -> None:
        if new.seed in self._broken:
            raise InvalidRequest("seed", "is broken")
        assert new.row not in self.rows
        self.rows.add(new.row)
        self.seen[new.row] = []

    def remove(self, row: int) -> None:
        self.rows.discard(row)

    def sample(self, logits: Tensor, samples: Samples, history: TokenHistory) -> Greedy:
        rows = samples.rows.tolist()
        assert set(rows) <= self.rows
        assert logits.shape[0] == len(rows)
        for row, line in zip(rows, logits, strict=True):
            self.seen[row].append(line.float().cpu().clone())
        return Greedy(logits.argmax(dim=-1))


class Bench:
    """A worker driven by hand. Hands out blocks in a scattered order and keeps what every row should hold.

    A row of a model with recurrent layers gets a slot for its state when it is computed first; `move` gives it another.
    """

    def __init__(
        self,
        checkpoint: MemoryCheckpoint,
        config: EngineConfig,
        *,
        attention: str = "auto",
        sampler: Any = None,
        row_kernel: RowKernel | None = None,  # of steps of one row, where it is not the usual one
    ) -> None:
        config = with_states(config, checkpoint.config)
        attention = backend_for(checkpoint.config, attention)
        config = replace(config, device=replace(config.device, attention_backend=attention))
        builder = LayerBuilder(
            config.device, checkpoint.config.heads, config.cache.block_size, checkpoint.config.local_heads
        )
        model = build_model(checkpoint.config, builder)
        load_weights(model, checkpoint)
        if row_kernel is not None:
            model.blocks.run_rows_by(row_kernel)
        self.model_config = checkpoint.config
        self.sampler = sampler or GreedySampler()
        adapters = make_adapters(model, checkpoint.config, config, builder.backend.kernels)
        self.worker = Worker(model, builder.backend, self.sampler, checkpoint.config, config, adapters=adapters)
        order = torch.randperm(config.cache.num_blocks, generator=torch.Generator().manual_seed(1))
        self.free: list[int] = order.tolist()
        self.size = config.cache.block_size
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.step = 0
        self.free_slots = list(range(config.cache.groups.num_states))[::-1]
        self.slots: dict[int, int] = {}  # of rows that were computed, or shared with their parents
        self._owners: set[int] = set()  # rows with a slot of their own
        self._moves: list[StateMove] = []
        self._new: list[NewRow] = []
        self._grants: list[tuple[int, int, int]] = []
        self._copies: list[BlockCopy] = []
        self._released: list[int] = []
        self._writes: list[RowTokens] = []
        self._placements: list[AdapterPlacement] = []

    def put_adapter(self, slot: int, folder: Any) -> str:
        """Have the next step put an adapter into a slot; returns its digest."""
        assert self.worker.adapters is not None
        digest = self.worker.adapters.store.read("adapter", str(folder)).digest
        self._placements.append(AdapterPlacement(slot, digest))
        return digest

    def add(
        self,
        row: int,
        tokens: Sequence[int],
        *,
        parent: int | None = None,
        blocks: Sequence[int] = (),  # that it holds already, without a parent
        state: int = -1,
        seed: int = 0,
        num_candidates: int = 0,
        num_prompt: int | None = None,
        rules: TokenRules | None = None,
        images: Sequence[PromptImage] = (),
        adapter: int = NO_ADAPTER,
        **sampling: Any,
    ) -> None:
        self.tokens[row] = list(tokens)
        self.tables[row] = list(blocks if parent is None else self.tables[parent])
        state = state if parent is None else self.slots.get(parent, -1)
        self.slots[row] = state
        self._owners.discard(row if parent is None else parent)  # what is shared is not written to
        self._new.append(
            NewRow(
                row=row,
                token_ids=np.asarray(tokens, dtype=np.int32),
                num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
                block_ids=tuple(self.tables[row]),
                sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
                rules=rules or TokenRules(),
                sample_index=0,
                seed=seed,
                num_candidates=num_candidates,
                images=tuple(images),
                adapter=adapter,
            )
        )

    def prompt_tables(self, row: int) -> list[LogprobTable]:
        """The prompt logprobs of a row in the last step."""
        pending = self.output.prompt_logprobs
        return [each.table for each in pending.finish([part.cpu() for part in pending.tensors]) if each.row == row]

    def write(self, row: int, start: int, tokens: Sequence[int]) -> None:
        """Say what the row's tokens are from a position on."""
        self.tokens[row][start:] = tokens
        self._writes.append(RowTokens(row, start, np.asarray(tokens, dtype=np.int32)))

    def release(self, row: int, *, keep_blocks: bool = False) -> None:
        self._released.append(row)
        if not keep_blocks:
            self.free += self.tables.pop(row)
        del self.tokens[row]
        if row in self._owners:
            self._owners.remove(row)
            self.free_slots.append(self.slots[row])

    def move(self, row: int, position: int) -> int:
        """From this token on the row's state is kept in another slot; returns the slot before."""
        before, self.slots[row] = self.slots[row], self.free_slots.pop()
        self._owners.add(row)
        self._moves.append(StateMove(row, position, self.slots[row], before))
        return before

    def reserve(self, row: int, length: int) -> None:
        """Grant blocks until the row can hold `length` tokens."""
        while len(self.tables[row]) * self.size < length:
            self._grant(row, len(self.tables[row]))

    def unshare_tail(self, row: int) -> None:
        """Copy the row's last block to a fresh one."""
        slot = len(self.tables[row]) - 1
        source = self.tables[row][slot]
        self._grant(row, slot)
        self._copies.append(BlockCopy(source, self.tables[row][slot]))

    def run(
        self, decode: Sequence[int] = (), chunks: Sequence[Chunk] = (), masks: Masks | None = None
    ) -> dict[int, int]:
        """Run one step, growing tables as needed; returns the token sampled by each row, its last one if several."""
        plan = self.plan(decode, chunks, masks)
        self.output = self.worker.execute(plan)
        self.worker.check()
        sampled = dict(zip(plan.sample_rows.tolist(), self.output.token_ids.tolist(), strict=True))
        verified = {chunk.row for chunk in chunks if chunk.num_sampled > 1}
        for row, token in sampled.items():
            if row not in verified:
                self.tokens[row].append(token)
        return sampled

    def plan(self, decode: Sequence[int], chunks: Sequence[Chunk], masks: Masks | None) -> StepPlan:
        """The next step, with all that changed since the last one."""
        for row in decode:
            self.reserve(row, len(self.tokens[row]))
        for chunk in chunks:
            self.reserve(chunk.row, chunk.start + chunk.num_tokens)
        starts = [(row, len(self.tokens[row]) - 1) for row in decode] + [(chunk.row, chunk.start) for chunk in chunks]
        if self.free_slots:
            for row, start in starts:
                if row not in self._owners:
                    self.move(row, start)
        grants = np.asarray(self._grants, dtype=np.int32).reshape(-1, 3).T
        plan = StepPlan(
            step=self.step,
            decode_rows=np.asarray(decode, dtype=np.int32),
            chunks=tuple(chunks),
            new_rows=tuple(self._new),
            grant_rows=grants[0],
            grant_slots=grants[1],
            grant_blocks=grants[2],
            states=tuple(sorted(self._moves)),
            copies=tuple(self._copies),
            released=tuple(self._released),
            writes=tuple(self._writes),
            masks=masks,
            adapters=tuple(self._placements),
        )
        self._placements = []
        self._new, self._grants, self._copies, self._released, self._writes = [], [], [], [], []
        self._moves = []
        self.step += 1
        return plan

    @property
    def result(self) -> StepResult:
        """Of the newest step."""
        return self.output.result([tensor.cpu() for tensor in self.output.tensors])

    def _grant(self, row: int, slot: int) -> None:
        block = self.free.pop()
        if slot < len(self.tables[row]):
            self.tables[row][slot] = block
        else:
            self.tables[row].append(block)
        self._grants.append((row, slot, block))


def greedy_reference(model: torch.nn.Module, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
    """transformers' own greedy tokens, computed with its cache, and the logits they came from [count, vocab]."""
    tokens, logits, cache = list(prompt), [], None
    fed = torch.tensor([tokens])
    with torch.no_grad():
        for _ in range(count):
            begin = len(tokens) - fed.shape[1]  # transformers' Bamba counts positions from 0 in every call
            own = {"position_ids": begin + torch.arange(fed.shape[1])[None]} if _is_bamba(model) else {}
            if getattr(model.config, "model_type", None) == "recurrent_gemma":  # returns no cache
                logits.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1])
                tokens.append(int(logits[-1].argmax()))
                continue
            key = "cache_params" if hasattr(model, "backbone") else "past_key_values"  # of Mamba
            out = model(fed, **{key: cache}, use_cache=True, **own)
            cache = out[key]
            logits.append(out.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
            fed = torch.tensor([[tokens[-1]]])
    return tokens[len(prompt) :], torch.stack(logits)


def _is_bamba(model: torch.nn.Module) -> bool:
    return getattr(model.config, "model_type", None) == "bamba"


def mix_steps(made: Bench) -> Bench:
    """Run prompts of 5, 9 and 24 tokens in chunks beside decodes: steps of all kinds."""
    prompt = list(range(3, 27))
    made.add(0, prompt[:5])
    made.add(1, prompt[:9])
    made.run(chunks=[Chunk(0, 0, 5, (0,)), Chunk(1, 0, 6)])
    made.run(decode=[0], chunks=[Chunk(1, 6, 3, (1,))])
    made.add(4, prompt)
    made.run(decode=[1, 0], chunks=[Chunk(4, 0, 7)])
    made.run(decode=[0, 1], chunks=[Chunk(4, 7, 1)])
    made.run(decode=[1], chunks=[Chunk(4, 8, 15)])
    made.run(chunks=[Chunk(4, 23, 1, (4,))])
    made.run(decode=[4, 0, 1])
    return made


def compare_steps(found: Bench, wanted: Bench, within: float = 1e-2) -> None:
    """Compare the tokens, and roughly the logits, of two benches that ran the same steps."""
    assert found.tokens == wanted.tokens
    for row, seen in wanted.sampler.seen.items():
        torch.testing.assert_close(torch.stack(found.sampler.seen[row]), torch.stack(seen), rtol=0.0, atol=within)
