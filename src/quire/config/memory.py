"""The memory plan: how much memory a model needs with its settings, computed before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.adapter_memory import MANY_TOKENS, adapter_memory, host_adapter_memory
from quire.config.attention_memory import attention_parts, chosen_memory, scratch_memory
from quire.config.engine import GRAPH_ROWS, EngineConfig, SchedulerConfig, token_buckets
from quire.config.facts import HardwareFacts
from quire.config.kv_cache import PLAIN, SCALED_DTYPES, KVGroups, lay_out, stored_specs
from quire.config.model import DTYPE_BYTES, Experts, ModelConfig
from quire.config.rank_model import largest_rank
from quire.config.sampling_memory import mask_memory, rotary_memory, sampling_memory
from quire.config.sizes import MIB, at_least, at_most, describe_shortage, format_size, format_table
from quire.config.vision import image_bytes
from quire.config.weight_memory import weight_memory
from quire.types.errors import DoesNotFit

PROCESS_BYTES = {"cpu": 320 * MIB, "cuda": 768 * MIB}  # Python, torch and its libraries; on a GPU the CUDA context
GATHERED_BYTES = {"cpu": 2 * MIB, "cuda": 256 * MIB}  # keys that gather attention copies at once, at least one sequence
IN_PLACE_BYTES = {  # work lists and partial results of attention backends that read the cache in place
    "native": 16 * MIB,
    "triton": 64 * MIB,  # and partial results of gemms
    "flashinfer": 160 * MIB,
    "virtual": 64 * MIB,  # attention masks
}
TABLE_BYTES = 4  # bytes of one entry (token or block) in the tables of rows
GRAPH_BYTES = 16 * MIB  # one captured decode graph: its nodes and kernels
TOKEN_GRAPH_BYTES = 8 * MIB  # the captured graphs of one token bucket: prompts, decodes, or both
NUM_GRAPHS = 32  # captured decode graphs: one or two (with and without top_k / top_p) per row bucket
SHORT_GRAPHS = 16  # captured steps that verify drafts: 8 token buckets, with and without top_k and top_p
SAVE_STAGING_BYTES = 512 * MIB  # GPU buffer for blocks being copied to host memory: what PCIe carries in a long step
LOAD_STAGING_BYTES = 256 * MIB  # GPU buffer for blocks being copied from host memory
ADAPTER_FIX = "lower max_loras, max_cpu_loras or max_lora_rank"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory in bytes by purpose, and the size of the KV cache in blocks. `str()` gives the table printed at start."""

    device: str
    capacity: int  # bytes that this process may use on the device
    process: int
    weights: int
    activations: int
    sampling: int  # logits and the sampler's buffers
    masks: int  # bitmasks of allowed tokens: one bit per row and token
    rows: int  # persistent state of the sequences on the device
    graphs: int  # captured decode steps
    block_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    draft: int = 0  # weights, rows and sampling of a draft model; its keys and values are part of the blocks
    host_cache: int = 0  # the host tier; on a CPU it is part of the same memory
    host_masks: int = 0  # beside a GPU: masks in host memory, most of it pinned
    host_available: int = 0  # bytes of host memory that the host tier and the masks of a GPU may use
    staging: int = 0  # GPU buffers for blocks being copied to and from host memory
    groups: KVGroups = PLAIN  # groups of layers; window blocks count among `num_blocks`
    max_chunk: int = 0  # most tokens of one sequence in a step
    images: int = 0  # encoding the largest image, and the cached vectors of images
    adapters: int = 0  # slots for LoRA adapters
    host_adapters: int = 0  # LoRA adapters in host memory; on a CPU part of the same memory
    rotary: int = 0  # tables of rotary positions
    held_sampling: int = 0  # the part of `sampling` allocated at the start

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence, over all recurrent layers."""
        return self.groups.blocks_per_state * self.block_bytes

    @property
    def states(self) -> int:
        return self.groups.num_states * self.state_bytes

    @property
    def kv_cache(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def total(self) -> int:
        return self.fixed + self.kv_cache

    @property
    def fixed(self) -> int:
        """Bytes of everything except the KV cache."""
        needed = self.process + self.weights + self.activations + self.sampling + self.rows + self.graphs + self.rotary
        host = self.host_cache if self.device == "cpu" else 0
        return needed + self.images + self.all_adapters + self.masks + self.draft + self.staging + self.states + host

    @property
    def held(self) -> int:
        """Bytes of GPU memory in use after the start, while no step runs and all graphs are captured."""
        steps = self.activations + self.images + self.sampling - self.held_sampling + self.masks // 2
        return self.total - steps

    @property
    def all_adapters(self) -> int:
        """Bytes of LoRA adapters in device memory."""
        return self.adapters + (self.host_adapters if self.device == "cpu" else 0)

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of a sequence of max_model_len tokens, window blocks included."""
        return self.groups.blocks_needed(-(-self.max_model_len // self.block_size), self.block_size, self.max_chunk)

    @property
    def window_blocks_per_sequence(self) -> int:
        """The part of `blocks_per_sequence` that are window blocks of other blocks."""
        return max(self.blocks_per_sequence - -(-self.max_model_len // self.block_size), 0)

    def longest_in(self, num_blocks: int) -> int:
        """Return the length in tokens of the longest sequence that fits into `num_blocks` blocks."""
        return self.groups.blocks_held(num_blocks, self.block_size, self.max_chunk) * self.block_size

    @property
    def num_sequences(self) -> float:
        """How many sequences of max_model_len tokens fit into the KV cache."""
        return self.num_blocks / self.blocks_per_sequence

    def check(self) -> None:
        """Raise DoesNotFit if the plan exceeds the capacity. The error names the setting to change."""
        if self.blocks_per_sequence > self.num_blocks:
            longest = self.longest_in(self.num_blocks)
            windows = f", {more} of them window blocks" if (more := self.window_blocks_per_sequence) else ""
            beside = f", beside {format_size(self.states)} for states" if self.states else ""
            raise DoesNotFit(
                "max_model_len",
                f"{self.max_model_len} tokens need {self.blocks_per_sequence} KV blocks of {self.block_size}"
                f"{windows}, the cache has {self.num_blocks} ({format_size(self.kv_cache)}{beside})",
                (f"set max_model_len to {longest} or less, or " if longest else "")
                + f"raise num_kv_blocks to {self.blocks_per_sequence} "
                f"(kv_cache_memory={at_least(self.blocks_per_sequence * self.block_bytes)})",
            )
        host_room = max(self.host_available - self.host_masks, 0)
        if self.device != "cpu" and self.host_adapters > host_room:
            needed, free = format_size(self.host_adapters), format_size(host_room)
            short = f"{needed} of host memory are needed, {free} are available"
            raise DoesNotFit("max_cpu_loras", short, "lower it, or max_lora_rank")
        host_room -= self.host_adapters
        if self.device != "cpu" and self.host_cache > host_room:
            raise DoesNotFit(
                "host_cache_memory",
                f"{format_size(self.host_cache)} are asked for, {format_size(host_room)} are available",
                f"lower it to {at_most(host_room)} or less" if host_room >= self.block_bytes else "leave it out",
            )
        if self.total <= self.capacity:
            return
        raise DoesNotFit(*self._largest_saving(describe_shortage(self.total, self.capacity, self.device)))

    def host_fix(self, kv_cache: int) -> str | None:
        """Return the change of host_cache_memory that makes room for a KV cache of `kv_cache` bytes on a CPU, or None
        if no such change exists."""
        most = self.capacity - self.fixed + self.host_cache - kv_cache
        if self.device != "cpu" or not self.host_cache or most < 0:
            return None
        return f"lower it to {at_most(most)} or less" if most >= self.block_bytes else "leave it out"

    def _largest_saving(self, short: str) -> tuple[str, str, str]:
        smallest_cache = self.blocks_per_sequence * self.block_bytes
        room = self.capacity - self.fixed
        if room >= smallest_cache:
            fix = f"lower it to {at_most(room)} (num_kv_blocks={room // self.block_bytes}) or less"
            return "kv_cache_memory", short, fix
        needed = self.kv_cache if self.host_fix(self.kv_cache) else smallest_cache
        if (less := self.host_fix(needed)) is not None:
            return "host_cache_memory", short, less
        if room > 0 and (tokens := self.longest_in(room // self.block_bytes)) > 0:
            return "max_model_len", short, f"lower it to {tokens} or less; the KV cache then shrinks with it"
        if self.groups.num_states and room + self.states >= smallest_cache:
            fix = f"lower it: a sequence takes {format_size(self.state_bytes)} of memory for states"
            return "max_num_seqs", f"{short} ({format_size(self.states)} of them states)", fix
        if self.adapters and room + self.all_adapters >= smallest_cache:
            return "max_loras", f"{short} ({format_size(self.all_adapters)} of them for adapters)", ADAPTER_FIX
        if self.activations + self.sampling + self.masks + self.rows + self.graphs > self.weights:
            return "max_num_batched_tokens", short, "lower it, and max_num_seqs, or use a device with more memory"
        return "model", f"{short} ({format_size(self.weights)} of them weights)", "choose a smaller model or dtype"

    @property
    def _where_host_is(self) -> str:
        return "allocated as it fills" if self.device == "cpu" else "pinned host memory, allocated as it fills"

    @property
    def _where_masks_are(self) -> str:
        beside = f", and up to {format_size(self.host_masks)} of host memory" if self.host_masks else ""
        return f"tokens that grammars allow{beside}"

    def __str__(self) -> str:
        lines = [
            ("weights", self.weights, ""),
            *([("drafting", self.draft, "weights, rows and sampling of the draft")] if self.draft else []),
            *([("adapters", self.adapters, "slots for LoRA adapters")] if self.adapters else []),
            *([("host adapters", self.host_adapters, "in host memory, as they are loaded")] if self.adapters else []),
            ("activations", self.activations, "upper bound for one step"),
            *([("images", self.images, "encoding the largest one")] if self.images else []),
            ("logits, sampling", self.sampling, ""),
            ("masks", self.masks, self._where_masks_are),
            ("rows", self.rows, ""),
            ("rotary tables", self.rotary, ""),
            *([("graphs", self.graphs, "captured decode steps")] if self.graphs else []),
            ("KV cache", self.kv_cache, f"{self.num_blocks:,} blocks of {self.block_size} tokens"),
            *([("states", self.states, f"{self.groups.num_states:,} sequences")] if self.states else []),
            *([("staging", self.staging, "buffers for copies to and from host memory")] if self.staging else []),
            *([("host cache", self.host_cache, self._where_host_is)] if self.host_cache else []),
            ("process", self.process, "Python, torch, libraries"),
            ("total", self.total, f"of {format_size(self.capacity)} on {self.device}"),
        ]
        held = f"  holds {self.num_sequences:.1f} sequences of {self.max_model_len:,} tokens"
        return "\n".join(["memory plan", *format_table(lines), held, *self._windows])

    @property
    def _windows(self) -> list[str]:
        """Lines that say how many blocks of a sequence serve each group, if layers have a window."""
        if self.groups.window is None:
            return []
        more, window = self.window_blocks_per_sequence, f"layers that see {self.groups.window:,}"
        if self.groups.all_windows:
            return [f"  each takes up to {self.blocks_per_sequence:,} blocks, for all {window}"]
        full = f"{self.blocks_per_sequence - more:,} blocks for the layers that see all tokens"
        return [f"  each takes {full} and up to {more:,} for the {window}"]


def kv_block_bytes(model: ModelConfig, kv_dtype: str, block_size: int, groups: KVGroups = PLAIN) -> int:
    """Return the bytes of one block, scales included: the keys and values of all attention layers, without those of
    layers that use window blocks."""
    layout = lay_out(stored_specs(model.kv_specs, kv_dtype), split=groups.window is not None)
    return layout.num_planes * layout.numbers * DTYPE_BYTES[kv_dtype] * block_size


def state_groups(model: ModelConfig, kv_dtype: str, block_size: int, num_states: int) -> KVGroups:
    """Return the KVGroups of a model with recurrent layers and `num_states` state slots."""
    layout = lay_out(stored_specs(model.kv_specs, kv_dtype), split=False)
    side = layout.numbers // model.heads.sides * DTYPE_BYTES[kv_dtype] * block_size
    return KVGroups(num_states=num_states, blocks_per_state=layout.blocks_per_state(side))


def plan_memory(model: ModelConfig, config: EngineConfig, facts: HardwareFacts, capacity: int) -> MemoryPlan:
    """Compute the memory plan of the rank that needs most. Allocates nothing; `MemoryPlan.check` raises if it does not
    fit."""
    model = largest_rank(model, config.parallel)
    device, kind = config.device.device, config.device.device.partition(":")[0]
    scheduler, block_size, kv_dtype = config.scheduler, config.cache.block_size, config.device.kv_dtype
    speculation = config.speculation if model.is_last_stage else None  # the last pipeline stage drafts
    drafting = speculation is not None and speculation.method != "ngram"
    draft = None if speculation is None else speculation.draft
    draft = None if draft is None else largest_rank(draft, config.parallel)
    groups = config.cache.groups
    attention, value_bytes = _attention(config, facts), facts.weight_bytes(config.device.dtype, device)
    rows, (sampling, held_sampling) = _rows(scheduler, block_size, groups), sampling_memory(model, scheduler, attention)
    masks, host_masks = mask_memory(model, config, attention)
    drafted = sampling + masks + rows + _graphs(draft or model, config, facts) if drafting else 0
    block_bytes = kv_block_bytes(model, kv_dtype, block_size, groups)
    tier = config.cache.tiers.host_blocks * block_bytes  # the host tier does not hold the draft model's keys and values
    block_bytes += groups.num_window_blocks * TABLE_BYTES  # the table of its window blocks
    has_triton, step_bytes = attention == "triton", scheduler.max_num_batched_tokens * DTYPE_BYTES[config.device.dtype]
    drafted += 2 * len(model.head_layers or ()) * model.hidden_size * step_bytes  # taken by stages for an EAGLE head
    if drafting:
        drafted += scratch_memory(draft or model, config, facts, has_triton=has_triton)
    if draft is not None:
        drafted += weight_memory(draft, config, facts, has_triton=has_triton)
        drafted += rotary_memory(draft, scheduler.max_model_len, value_bytes)
        block_bytes += kv_block_bytes(draft, kv_dtype, block_size)
        if draft.states_read:  # a feature per cached token, and the hidden states of a step
            block_bytes += block_size * draft.hidden_size * DTYPE_BYTES[config.device.dtype]
            drafted += (draft.states_read + 1) * draft.hidden_size * step_bytes
    return MemoryPlan(
        device=device,
        capacity=capacity,
        process=PROCESS_BYTES[kind],
        weights=weight_memory(model, config, facts, has_triton=has_triton),
        activations=_activations(model, config, facts),
        sampling=sampling,
        masks=masks,
        rows=rows,
        graphs=_graphs(model, config, facts),
        block_bytes=block_bytes,
        num_blocks=config.cache.num_blocks,
        block_size=block_size,
        max_model_len=scheduler.max_model_len,
        draft=drafted,
        host_cache=tier,
        host_masks=host_masks,
        host_available=facts.available_memory,
        staging=0 if kind == "cpu" else min(SAVE_STAGING_BYTES, tier) + min(LOAD_STAGING_BYTES, tier),
        groups=groups,
        max_chunk=scheduler.max_num_batched_tokens,
        images=_images(model, scheduler, value_bytes),
        adapters=_adapters(model, config, facts),
        host_adapters=host_adapter_memory(model, config.adapters, DTYPE_BYTES[config.device.dtype]),
        rotary=rotary_memory(model, scheduler.max_model_len, value_bytes),
        held_sampling=held_sampling,
    )


def _adapters(model: ModelConfig, config: EngineConfig, facts: HardwareFacts) -> int:
    dtype, tokens = config.device.dtype, config.scheduler.max_num_batched_tokens
    tiled = dtype == "bfloat16" and facts.tile_units and _attention(config, facts) == "native"
    held = adapter_memory(model, config.adapters, DTYPE_BYTES[dtype], tokens, tiled=tiled)
    if config.adapters is None or _attention(config, facts) != "triton":
        return held
    # In steps with few tokens, LoRA outputs are in separate buffers, none larger than a layer's activations.
    return held + min(tokens, MANY_TOKENS) * widest_activations(model) * DTYPE_BYTES[dtype]


def _images(model: ModelConfig, scheduler: SchedulerConfig, weight_bytes: int) -> int:
    if model.vision is None or scheduler.images is None:
        return 0
    context = (scheduler.max_model_len, max(heads.kv_size for heads in model.all_heads))
    return image_bytes(model.vision, scheduler.images, model.hidden_size, weight_bytes, context)


def _attention(config: EngineConfig, facts: HardwareFacts) -> str:
    """Return the attention backend that is expected to run. Backends in IN_PLACE_BYTES read the cache in place."""
    device = config.device
    if device.attention_backend != "auto":
        return device.attention_backend
    if device.device != "cpu":
        return "triton" if facts.triton else "gather"
    native = device.dtype != "float16" and facts.native_refusal is None
    return "native" if native else "gather"


def _activations(model: ModelConfig, config: EngineConfig, facts: HardwareFacts) -> int:
    """Return the bytes of a layer's activations at their peak (residual, normed input, and the tensors of attention or
    MLP), and of attention's buffers: gathered keys and values, rounded up to a power of two, and masks of prompt
    chunks."""
    scheduler, kv_bytes = config.scheduler, DTYPE_BYTES[config.device.kv_dtype]
    value_bytes = facts.weight_bytes(config.device.dtype, config.device.device)
    widest = scheduler.max_num_batched_tokens * widest_activations(model) * max(value_bytes, DTYPE_BYTES["float32"])
    attention = _attention(config, facts)
    if attention == "native" and config.device.dtype == "float16":
        attention = "gather"  # keys and values are converted to float32 before the kernels read them
    if attention == "triton":
        widest += attention_parts(model, config) + scratch_memory(model, config, facts, has_triton=True)
    widest += chosen_memory(model, scheduler)
    if attention in IN_PLACE_BYTES:
        return widest + IN_PLACE_BYTES[attention]
    longest = scheduler.max_model_len * max(heads.kv_size for heads in model.all_heads) * kv_bytes
    gathered = 2 * max(GATHERED_BYTES[config.device.device.partition(":")[0]], longest)
    converted = 0 if value_bytes == kv_bytes else gathered * value_bytes // kv_bytes
    if config.device.kv_dtype in SCALED_DTYPES:  # dequantized in float32, then rounded
        converted += gathered * DTYPE_BYTES["float32"]
    masks = scheduler.max_num_batched_tokens * scheduler.max_model_len * (value_bytes + 1)
    return widest + 2 * gathered + converted + masks


def widest_activations(model: ModelConfig) -> int:
    """Return the elements per token when a layer's activations are at their peak."""
    heads = model.heads
    attention = max(2 * (each.query_size + 2 * each.kv_size) + 2 * each.query_size for each in model.all_heads)
    mlp = 3 * max(model.mlp_size_of(layer) for layer in range(model.num_layers))
    if model.experts is not None:
        mlp = max(
            mlp if model.experts.dense_layers or model.experts.beside_mlp else 0,
            _widest_mixture(model.hidden_size, model.experts),
        )
    mixer = 0
    if (recurrent := model.recurrent) is not None:
        mixer = 2 * recurrent.channels + 2 * recurrent.value_size + 2 * recurrent.value_heads
    gate = heads.query_size if model.attention_gate else 0
    beside = 3 * model.num_layers * model.per_layer_input
    if any(model.sparsity):
        mlp += 2 * model.intermediate_size
    return 2 * (model.hidden_size + model.stream_size) + beside + max(attention + gate, mlp, mixer)


def _widest_mixture(hidden: int, experts: Experts) -> int:
    """Return the peak elements per token of a mixture of experts: router logits, the shared expert's output, and the
    sum with either the outputs of all experts of a token or, if experts run one after the other, the rows of one
    expert, to which all tokens may be routed."""
    width = experts.width(hidden)
    at_once = experts.num_used * (experts.size + width + 2)
    one = 3 * experts.size + 3 * width
    latents = 2 * experts.latent_size
    return 2 * experts.num + hidden + max(3 * experts.shared_size, hidden + latents + max(at_once, one))


def _graphs(model: ModelConfig, config: EngineConfig, facts: HardwareFacts) -> int:
    """Return the bytes of captured graphs. They share one memory pool of the size that the largest graph needs, counted
    twice because the order of capture fragments it."""
    captured = config.device.device != "cpu" and not config.device.enforce_eager
    if not captured or _attention(config, facts) != "triton":
        return 0
    rows, value_bytes = min(config.scheduler.num_rows, GRAPH_ROWS), DTYPE_BYTES[config.device.dtype]
    tokens = token_buckets(model, config)
    widest = widest_activations(model)
    kinds = 1 if config.adapters is None else 2  # steps with and without LoRA adapters
    num_graphs = NUM_GRAPHS if config.speculation is None else NUM_GRAPHS + SHORT_GRAPHS
    choosing = kinds * num_graphs * GRAPH_BYTES + 2 * rows * (widest + model.vocab_size) * value_bytes
    if scratch_memory(model, config, facts, has_triton=True):
        kinds *= 2  # steps whose prompts read the dequantized copy, and steps that read the cache itself
    return choosing + kinds * len(tokens) * TOKEN_GRAPH_BYTES + 2 * max(tokens, default=0) * widest * value_bytes


def _rows(scheduler: SchedulerConfig, block_size: int, groups: KVGroups) -> int:
    """Return the bytes of all rows: token history, block table, window tables, and 512 bytes of other state per row."""
    blocks = -(-scheduler.max_model_len // block_size) * (1 + groups.num_window_blocks)
    return scheduler.num_rows * ((scheduler.max_model_len + blocks) * TABLE_BYTES + 512)
