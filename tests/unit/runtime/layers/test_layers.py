"""Layers against the plain functions they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.config.model import Heads
from quire.kernels.clamp import Clamp
from quire.kernels.native import ops, panels
from quire.kernels.native.loader import why_not_native
from quire.kernels.reference.elementwise import rms_norm, silu_and_multiply
from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers import gemm_choice
from quire.runtime.layers.gemm import DenseGemm, Gemm, PackedGemm, UpcastGemm
from quire.runtime.layers.linear import KeysAsValues, Linear
from quire.runtime.layers.mlp import GatedMLP
from quire.runtime.layers.modules import Embedding, HeadNorm, RMSNorm, TiedHead
from quire.runtime.layers.native import DotGemm, PanelGemm
from quire.runtime.layers.ops import LayerOps, TorchOps, choose_ops
from quire.runtime.layers.weights import Placement, WeightLayer

CPU = Placement(torch.float32, torch.device("cpu"))
OPS = [TorchOps(), choose_ops(CPU.dtype, CPU.device)]
DENSE = DenseGemm(torch.float32)


def filled(layer: WeightLayer, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {part: torch.randn(layer.part_shape(part), generator=generator) for part in layer.parts}
    for part, weight in weights.items():
        layer.load(part, weight)
    layer.finish()
    return weights


@pytest.mark.parametrize("product", [DENSE, PackedGemm(torch.float32), UpcastGemm(torch.float32, DENSE)])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_stacked_matrices_give_their_results_side_by_side(product: Gemm, tokens: int, bias: bool) -> None:
    layer = Linear(24, {"a": 16, "b": 8}, bias, product, CPU)
    weights = filled(layer)
    x = torch.randn(tokens, 24)
    expected = [F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")) for name in "ab"]
    torch.testing.assert_close(layer(x), torch.cat(expected, dim=1))


def test_a_linear_takes_no_memory_before_its_first_part_comes() -> None:
    layer = Linear(24, {"a": 16, "b": 8}, True, DENSE, CPU)
    assert layer.part_shape("b.weight") == (8, 24)
    assert layer.weight.is_meta
    filled(layer)
    assert layer(torch.randn(3, 24)).shape == (3, 24)


def test_an_upcast_weight_keeps_the_values_of_the_run_dtype() -> None:
    half = Placement(torch.bfloat16, torch.device("cpu"))
    layer = Linear(24, {"a": 16}, False, UpcastGemm(torch.bfloat16, DENSE), half)
    weight = filled(layer)["a.weight"].bfloat16().float()
    x = torch.randn(3, 24, dtype=torch.bfloat16)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, F.linear(x.float(), weight).bfloat16())


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_the_plain_formula(dtype: torch.dtype, ops: LayerOps) -> None:
    layer = RMSNorm("norm", 32, 1e-5, ops, Placement(dtype, torch.device("cpu")))
    weight = filled(layer)["norm.weight"].to(dtype)
    x = torch.randn(6, 32).to(dtype)
    torch.testing.assert_close(layer(x), rms_norm(x, weight, 1e-5))


def test_head_norm_scales_queries_and_keys_by_their_own_weights() -> None:
    layer = HeadNorm(Heads(num_query=4, num_kv=2, dim=16), 1e-6, CPU)
    weights = filled(layer)
    qk = torch.randn(3, 6, 16)
    out = layer(qk)
    torch.testing.assert_close(out[:, :4], rms_norm(qk[:, :4], weights["q_norm.weight"], 1e-6))
    torch.testing.assert_close(out[:, 4:], rms_norm(qk[:, 4:], weights["k_norm.weight"], 1e-6))


@pytest.mark.parametrize("ops", OPS)
def test_the_gated_mlp_is_the_plain_formula(ops: LayerOps) -> None:
    gate_up = Linear(8, {"gate_proj": 12, "up_proj": 12}, False, DENSE, CPU)
    down = Linear(12, {"down_proj": 8}, False, DENSE, CPU)
    first, last = filled(gate_up), filled(down, 1)
    x = torch.randn(4, 8)
    both = torch.cat([F.linear(x, first["gate_proj.weight"]), F.linear(x, first["up_proj.weight"])], dim=1)
    expected = F.linear(silu_and_multiply(both), last["down_proj.weight"])
    torch.testing.assert_close(GatedMLP(gate_up, down, "silu", ops)(x).value(), expected)


def test_a_tied_head_multiplies_by_the_embedding_itself() -> None:
    embedding = Embedding("embed_tokens", 11, 6, DENSE, CPU)
    head = TiedHead(embedding, DENSE)
    weight = filled(embedding)["embed_tokens.weight"]
    head.finish()
    torch.testing.assert_close(head(embedding(torch.tensor([3, 7]))), weight[[3, 7]] @ weight.T)
    assert head.parts == ()


def test_a_part_the_layer_does_not_have_is_an_error() -> None:
    with pytest.raises(KeyError):
        RMSNorm("norm", 4, 1e-5, TorchOps(), CPU).load("other.weight", torch.zeros(4))


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_land_in_their_slots_and_nowhere_else(dtype: torch.dtype, ops: LayerOps) -> None:
    cache = LayerCache.of(torch.zeros(5, 2, 4, 8, dtype=dtype), torch.zeros(5, 2, 4, 8, dtype=dtype))
    both = torch.randn(3, 6, 8).to(dtype)
    key, value = both[:, :2], both[:, 2:4]  # rows with a stride, as a fused projection gives them
    slots = torch.tensor([0, 4, 13, 9, 39, 27])
    ops.write(key, value, cache, slots)
    assert torch.equal(cache.key_slots[slots], key.reshape(-1, 8))
    assert torch.equal(cache.value_slots[slots], value.reshape(-1, 8))
    assert (cache.key_slots.abs().sum(dim=-1) > 0).sum() == 6


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gating_is_the_activation_times_the_other_half_far_from_zero_too(activation: str, ops: LayerOps) -> None:
    gate_up = torch.linspace(-120, 120, 64).view(2, 32)
    gate, up = gate_up.chunk(2, dim=-1)
    plain = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[activation]
    torch.testing.assert_close(ops.gate(gate_up, activation), plain(gate) * up)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("clamp", [Clamp(7.0, 1.702, 1.0), Clamp(10.0)])
def test_a_gate_within_limits_is_silu_of_what_is_kept(clamp: Clamp, ops: LayerOps) -> None:
    gate_up = torch.cat((torch.linspace(-20, 20, 40), torch.linspace(30, -12, 40))).view(1, 80)
    gate, up = gate_up[:, :40].clamp(max=clamp.limit), gate_up[:, 40:].clamp(-clamp.limit, clamp.limit)
    wanted = F.silu(gate * clamp.alpha) / clamp.alpha * (up + clamp.shift)
    torch.testing.assert_close(ops.gate(gate_up, "silu", clamp), wanted)


def test_values_that_are_keys_are_stored_once() -> None:
    layer = KeysAsValues(24, 16, 8, True, DENSE, CPU)
    assert layer.parts == ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")
    weights, x = filled(layer), torch.randn(3, 24)
    query, key, value = layer(x).split([16, 8, 8], dim=1)
    torch.testing.assert_close(query, F.linear(x, weights["q_proj.weight"], weights["q_proj.bias"]))
    torch.testing.assert_close(key, F.linear(x, weights["k_proj.weight"], weights["k_proj.bias"]))
    assert torch.equal(key, value)


def test_noise_is_the_same_in_keys_and_values() -> None:
    layer = KeysAsValues(24, 16, 8, False, DENSE, CPU)
    for part in layer.parts:
        layer.randomize(part, torch.Generator().manual_seed(0))
    layer.finish()
    _, key, value = layer(torch.randn(3, 24)).split([16, 8, 8], dim=1)
    assert torch.equal(key, value)


@pytest.mark.skipif(why_not_native(torch.bfloat16, CPU.device) is not None, reason="no native kernels")
def test_bfloat16_is_multiplied_by_the_compiled_kernels_with_and_without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_tile_units", lambda: False)
    for units in (False, True):
        monkeypatch.setattr(gemm_choice, "cpu_multiplies", lambda _dtype, units=units: units)
        monkeypatch.setattr(panels, "dot_inputs", lambda: 4)
        assert type(gemm_choice.choose_gemm(torch.bfloat16, CPU.device)) is DotGemm
        monkeypatch.setattr(panels, "dot_inputs", lambda: 0)
        assert type(gemm_choice.choose_gemm(torch.bfloat16, CPU.device)) is PanelGemm
    many = gemm_choice.choose_gemm(torch.bfloat16, CPU.device, many_rows=True)
    assert type(many) is PackedGemm
