"""The FlashInfer backend over a fake package, which computes from its arguments alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.attention import paged_attention
from quire.runtime.attention import flashinfer as backend_module
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.flashinfer import FlashInferAttention, why_not_flashinfer
from quire.runtime.attention.reference import ReferenceAttention
from quire.runtime.attention.registry import make_backend, resolve_backend
from quire.runtime.layers.weights import Placement
from quire.types.errors import ConfigError
from quire.types.step import Chunk
from tests.unit.runtime.attention.test_backends import batch_of
from tests.unit.runtime.worker.test_worker import checkpoint
from tiny_models import Bench, engine_config

HEADS = Heads(num_query=6, num_kv=2, dim=8)
RULE = AttentionRule(0.3)
CPU = Placement(torch.float32, torch.device("cpu"))
GPU = Placement(torch.bfloat16, torch.device("cuda"))


class StandInWrapper:
    """What both of FlashInfer's wrappers share."""

    made: ClassVar[list[Any]] = []

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any()
        self.layout, self.options = kv_layout, options
        self.num_plans = 0
        StandInWrapper.made.append(self)

    def keep(
        self, begins: Tensor, pages: Tensor, last: Tensor, shape: tuple[int, ...], options: dict[str, Any]
    ) -> None:
        """Indices are int32, counts lie on the host; a sequence's pages follow each other, the last one partly full."""
        assert [each.dtype for each in (begins, pages, last)] == [torch.int32] * 3
        assert begins.device.type == last.device.type == "cpu"
        assert len(begins) == len(last) + 1
        assert begins[0] == 0
        assert begins[-1] == len(pages)
        assert options["pos_encoding_mode"] == "NONE"
        assert options["kv_data_type"] == options["q_data_type"]
        *self.shape, self.page_size = shape
        self.begins, self.pages, self.last = begins.tolist(), pages.clone(), last.tolist()
        assert all(1 <= count <= self.page_size for count in self.last)
        self.scale, self.dtype = options["sm_scale"], options["q_data_type"]
        self.num_plans += 1

    def compute(self, query: Tensor, caches: tuple[Tensor, Tensor], counts: list[int], out: Tensor) -> Tensor:
        """The last `counts[i]` tokens of sequence i see all before them, as by FlashInfer's causal mask."""
        key, value = caches if self.layout == "HND" else (side.transpose(1, 2) for side in caches)
        assert list(key.shape[1:]) == [self.shape[1], self.page_size, self.shape[2]]
        assert list(query.shape) == [sum(counts), self.shape[0], self.shape[2]]
        assert query.dtype == key.dtype == self.dtype
        assert out.shape == query.shape
        begin = 0
        for i, count in enumerate(counts):
            pages = self.pages[self.begins[i] : self.begins[i + 1]].long()
            length = (len(pages) - 1) * self.page_size + self.last[i]
            tokens = slice(begin, begin + count)
            out[tokens] = paged_attention(query[tokens], key, value, pages, length - count, self.scale)
            begin += count
        return out


class StandInDecode(StandInWrapper):
    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *shape: int, **options: Any) -> None:
        self.keep(indptr, indices, last_page_len, shape, options)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        return self.compute(q, paged_kv_cache, [1] * len(self.last), out)


class StandInPrefill(StandInWrapper):
    def plan(self, qo_indptr: Tensor, *pages_and_shape: Any, causal: bool = False, **options: Any) -> None:
        assert causal
        assert qo_indptr.dtype == torch.int32
        self.counts = qo_indptr.diff().tolist()
        self.keep(*pages_and_shape[:3], pages_and_shape[3:], options)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        return self.compute(q, paged_kv_cache, self.counts, out)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = StandInDecode
    module.BatchPrefillWithPagedKVCacheWrapper = StandInPrefill
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(StandInWrapper, "made", [])
    monkeypatch.setattr(backend_module, "WORKSPACE_BYTES", 1 << 10)
    return module


def accepting(size: int) -> FlashInferAttention:
    """For layers by RULE, over blocks of this size."""
    backend = FlashInferAttention(HEADS, CPU, size)
    backend.accept(RULE)
    return backend


@pytest.fixture
def anywhere(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has no device of its own, so the registry may hand it out on this one."""
    monkeypatch.setattr("quire.runtime.attention.registry.why_not_flashinfer", lambda *_: None)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [
        ([1], []),
        ([9, 9, 9], []),
        ([300, 3, 17, 64, 65, 1, 250], []),
        ([], [(0, 13)]),
        ([], [(7, 5), (0, 1), (33, 20)]),
        ([40, 2], [(0, 6), (16, 16)]),
    ],
)
@pytest.mark.usefixtures("package")
def test_it_gives_the_results_of_the_reference(decodes: list[int], chunks: list[tuple[int, int]], size: int) -> None:
    batch, cache, tensors = batch_of(decodes, chunks, size, HEADS)
    backend, reference = accepting(size), ReferenceAttention()
    expected = reference.attend(*tensors, cache, reference.prepare(batch), RULE)
    found = backend.attend(*tensors, cache, backend.prepare(batch), RULE)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("package")
def test_a_chunk_with_more_blocks_than_it_needs_is_planned_with_those_it_needs() -> None:
    batch, cache, tensors = batch_of([], [(7, 5)], 4, HEADS)
    spare = torch.cat((batch.chunks[0].block_ids, torch.tensor([0, 0])))
    batch = replace(batch, chunks=(replace(batch.chunks[0], block_ids=spare),))
    backend, reference = accepting(4), ReferenceAttention()
    expected = reference.attend(*tensors, cache, reference.prepare(batch), RULE)
    torch.testing.assert_close(backend.attend(*tensors, cache, backend.prepare(batch), RULE), expected)


@pytest.mark.usefixtures("package")
def test_a_step_is_planned_once_and_run_for_every_layer() -> None:
    batch, cache, tensors = batch_of([40, 2], [(0, 6)], 4, HEADS)
    other = LayerCache.of(cache.value, cache.key)
    backend, reference = accepting(4), ReferenceAttention()
    before = [wrapper.num_plans for wrapper in StandInWrapper.made]
    plan = backend.prepare(batch)
    for layer in (cache, other):
        expected = reference.attend(*tensors, layer, reference.prepare(batch), RULE)
        torch.testing.assert_close(backend.attend(*tensors, layer, plan, RULE), expected)
    assert [wrapper.num_plans for wrapper in StandInWrapper.made] == [count + 1 for count in before]


@pytest.mark.usefixtures("package")
def test_a_plan_does_not_outlive_the_next_one() -> None:
    batch, cache, tensors = batch_of([40, 2], [], 4, HEADS)
    backend = accepting(4)
    old = backend.prepare(batch)
    backend.prepare(batch)
    with pytest.raises(AssertionError, match="another step"):
        backend.attend(*tensors, cache, old, RULE)


@pytest.mark.parametrize(("num_query", "tensor_cores"), [(2, False), (6, False), (8, True), (14, True)])
@pytest.mark.usefixtures("package")
def test_decode_rows_use_tensor_cores_where_many_query_heads_share_keys(num_query: int, tensor_cores: bool) -> None:
    FlashInferAttention(Heads(num_query, 2, 64), CPU, 16)
    assert StandInWrapper.made[0].options == {"use_tensor_cores": tensor_cores}


@pytest.mark.usefixtures("anywhere")
def test_a_worker_with_flashinfer_samples_the_tokens_of_the_reference() -> None:
    def run(attention: str) -> dict[int, list[int]]:
        bench = Bench(checkpoint(), engine_config(), attention=attention)
        bench.add(0, [5, 6, 7, 8, 9, 10, 11])
        bench.run(chunks=[Chunk(0, 0, 4)])
        bench.add(1, [3, 4])
        bench.run(chunks=[Chunk(0, 4, 3, (0,)), Chunk(1, 0, 2, (1,))])
        bench.add(2, [9, 8, 7])
        bench.run(decode=[0, 1], chunks=[Chunk(2, 0, 3, (2,))])
        for _ in range(6):
            bench.run(decode=[1, 0, 2])
        return bench.tokens

    assert run("flashinfer") == run("reference")


def test_it_is_refused_with_the_package_to_install_where_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"flashinfer-python is not installed; run pip install .*'\.\[flashinfer\]'"):
        resolve_backend("flashinfer", HEADS, GPU)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("rule", "reason"),
    [(AttentionRule(0.3, window=4), "sliding windows"), (AttentionRule(0.2), "scale their scores differently")],
)
def test_rules_that_its_wrappers_are_not_planned_for_are_refused(rule: AttentionRule, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"'flashinfer' cannot run here: .*{reason}.*use \"auto\""):
        accepting(4).accept(rule)


@pytest.mark.usefixtures("package")
def test_it_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match='its kernels run on CUDA devices; use "auto"'):
        make_backend("flashinfer", HEADS, torch.float32, CPU)


@pytest.mark.parametrize(
    ("capability", "placement", "dim", "kv_dtype", "reason"),
    [
        ((9, 0), GPU, 128, None, None),
        ((8, 0), GPU, 64, torch.bfloat16, None),
        ((7, 0), GPU, 128, None, "compute capability 7.0 is too old"),
        ((9, 0), GPU, 80, None, "a head size of 80"),
        ((9, 0), replace(GPU, dtype=torch.float32), 128, None, "float16 and bfloat16 only"),
        ((9, 0), GPU, 128, torch.float8_e4m3fn, "a KV cache of the model's dtype"),
    ],
)
@pytest.mark.usefixtures("package")
def test_unsupported_heads_dtypes_and_devices_are_refused_by_name(
    capability: tuple[int, int],
    placement: Placement,
    dim: int,
    kv_dtype: torch.dtype | None,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = why_not_flashinfer(placement, Heads(8, 2, dim), kv_dtype)
    assert (found is None) if reason is None else (reason in str(found))


@pytest.mark.parametrize("without_triton", [None, "triton is not installed"])
@pytest.mark.parametrize("placement", [CPU, GPU])
@pytest.mark.usefixtures("anywhere")
def test_auto_never_chooses_it(
    placement: Placement, without_triton: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runtime.attention.registry.why_not_triton", lambda *_: without_triton)
    assert resolve_backend("auto", Heads(8, 2, 128), placement) in ("triton", "native", "gather")


@pytest.mark.usefixtures("package")
def test_kernels_that_cannot_be_compiled_raise_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Ninja build failed.\nthe whole output of the compiler")

    monkeypatch.setattr(StandInPrefill, "plan", fail)
    with pytest.raises(ConfigError, match="not compiled: Ninja build failed.; put nvcc and ninja on PATH"):
        FlashInferAttention(HEADS, CPU, 16)


def test_an_import_error_inside_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ModuleNotFoundError("No module named 'tvm_ffi'")

    monkeypatch.setattr(backend_module, "import_module", fail)
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'tvm_ffi'"):
        FlashInferAttention(HEADS, CPU, 16)
