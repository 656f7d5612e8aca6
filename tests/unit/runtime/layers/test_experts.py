"""A layer's experts, in each form, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor

from interpreter import HAS_TRITON
from local_ranks import LocalGroup, run_ranks
from quire.config.engine import DeviceConfig
from quire.config.model import Experts
from quire.config.parallel import ParallelConfig
from quire.kernels.clamp import Clamp
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.ops import has_tile_units
from quire.kernels.native.program import ProgramWriter
from quire.kernels.native.program_run import Program
from quire.kernels.native.structures import ProgramStep
from quire.kernels.reference.experts import choose_experts, mix_experts
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.experts import MoEMLP
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.weights import WeightLayer, weight_layers
from quire.runtime.parallel import expert_sum
from quire.runtime.parallel.group import ONE_RANK
from quire.runtime.parallel.ranks import ALONE, Ranks
from quire.runtime.quantization.fp8 import rounded
from quire.runtime.quantization.levels import LevelWeight
from tiny_models import DEVICE, tiny_config

HIDDEN, SIZE, NUM = 64, 32, 5
PLAIN = Experts(NUM, 2, SIZE)
SETTINGS = {
    "normalized": PLAIN,
    "not normalized, scaled": replace(PLAIN, is_normalized=False, scale=1.5, num_used=3),
    "shared": replace(PLAIN, shared_size=32),
    "shared by a gate": replace(PLAIN, shared_size=32, shared_has_gate=True),
    "biases, and a gate within limits": replace(PLAIN, has_bias=True, clamp=(0.4, 1.7, 1.0)),
    "of some groups": replace(PLAIN, num_groups=5, groups_used=3, scale=2.5),
    "ranked by softmax and a bias": replace(PLAIN, biased_softmax=True),
    "inputs scaled by scores": replace(PLAIN, num_used=1, scales_inputs=True, shared_size=32),
    "without gates": replace(PLAIN, is_gated=False),
    "by sigmoids, with biases and limits": replace(PLAIN, by_sigmoid=True, has_bias=True, clamp=(0.4, 1.7, 1.0)),
}
REFUSAL = why_not_native(torch.float32, torch.device("cpu")) if DEVICE == "cpu" else "runs on a CPU"
FORMS = ["reference", "auto", *([] if REFUSAL else ["program"]), *(["triton"] if HAS_TRITON else [])]
EMPTY = torch.empty(0, dtype=torch.int64)
NOTHING = ProgramStep(EMPTY, EMPTY, EMPTY, None, (), ())  # a step without attention


class Layer:
    """A norm of ones and a mixture of random weights, in one of its forms."""

    def __init__(
        self, settings: Experts, attention: str, dtype: Any = "float32", quantization: Any = None, levels: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        config = tiny_config(hidden_size=HIDDEN, experts=settings)
        self.is_program = attention == "program"
        backend = "native" if self.is_program else attention
        device = DeviceConfig(DEVICE, dtype, dtype, attention_backend=backend, quantization=quantization)
        builder = LayerBuilder(device, config.heads, ranks=ranks)
        self.settings, self.norm = settings, builder.rms_norm("norm", HIDDEN, 1e-6)
        self.norm.weight.data.fill_(1.0)
        self.moe: MoEMLP = builder.experts.moe_mlp(config)
        self.tensors: dict[str, Tensor] = {}
        layers = list(weight_layers(self.moe))
        for layer, parts in layers:
            for name, part in parts.items():
                generator = torch.Generator().manual_seed(crc32(name.encode()))
                self.tensors[name] = torch.randn(layer.part_shape(part), generator=generator) * 0.2
        for layer, parts in layers:
            for name, part in parts.items():
                self.load(layer, name, part, levels=levels)
            layer.finish()

    def load(self, layer: WeightLayer, name: str, part: str, *, levels: bool) -> None:
        if not levels or self.tensors[name].dim() == 1:
            layer.load(part, self.tensors[name])
            return
        weight = as_levels(self.tensors[name], nibbles=self.has_nibbles(name))
        self.tensors[name] = weight.values()
        assert layer.load_quantized(part, weight)

    def has_nibbles(self, name: str) -> bool:
        """Whether levels of a matrix have 4 bits, not 8."""
        return False

    def __call__(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        if self.is_program:
            return self.program(x).run(x.clone(), NOTHING) - x
        return self.moe(self.norm(Stream(x.clone().to(DEVICE), rows))).cpu()

    def program(self, x: Tensor) -> Program:
        """Adds the mixture to its rows."""
        writer = ProgramWriter(x.dtype, HIDDEN)
        stream = Stream(writer.stream)
        stream.add(self.moe(self.norm(stream)))
        return writer.finish(stream.settle())

    def wanted(self, x: Tensor, quantized: bool = False) -> Tensor:
        tensors, settings = self.tensors, self.settings
        x = x * (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
        held = rounded if quantized else lambda weight: weight
        names = ("gate", "up", "down") if settings.is_gated else ("up", "down")
        *first, down = (
            torch.stack([held(tensors[f"experts.{expert}.{name}_proj.weight"]) for expert in range(NUM)])
            for name in names
        )
        biases = None
        if settings.has_bias:
            of_gate, of_up, of_down = (
                torch.stack([tensors[f"experts.{expert}.{name}_proj.bias"] for expert in range(NUM)])
                for name in ("gate", "up", "down")
            )
            biases = (torch.cat((of_gate, of_up), dim=1), of_down)
        logits, bias = x @ tensors["gate.weight"].t() + tensors.get("gate.bias", 0.0), None
        if settings.has_score_bias:
            bias = tensors["gate.e_score_correction_bias"].view(-1)
        if settings.biased_softmax and bias is not None:
            used = (logits.softmax(dim=-1) + bias).topk(settings.num_used, dim=-1).indices
            logits, bias = logits.masked_fill(torch.ones_like(logits).scatter(-1, used, 0.0) == 1, float("-inf")), None
        chosen, weights = choose_experts(
            logits,
            settings.num_used,
            is_normalized=settings.is_normalized,
            scale=settings.scale,
            groups=(settings.num_groups, settings.groups_used),
            score_bias=bias,
        )
        clamp = None if settings.clamp is None else Clamp(*settings.clamp)
        scaled = x * logits.amax(dim=-1, keepdim=True).sigmoid() if settings.scales_inputs else x
        if settings.is_gated:
            out = mix_experts(scaled, torch.cat(first, 1), down, chosen, weights, "silu", biases=biases, clamp=clamp)
        else:
            inner = torch.einsum("th,eih->tei", x, first[0])
            outs = torch.einsum("tei,ehi->teh", inner * inner.sigmoid(), down)
            out = (outs.take_along_dim(chosen[..., None], dim=1) * weights[..., None]).sum(dim=1)
        if settings.shared_size:
            gate, up, down = (held(tensors[f"shared_expert.{name}_proj.weight"]) for name in ("gate", "up", "down"))
            one = torch.ones(len(x), 1, dtype=torch.long)
            shared = mix_experts(x, torch.cat((gate, up))[None], down[None], one - 1, one.float(), "silu")
            if settings.shared_has_gate:
                shared = shared * torch.sigmoid(x @ tensors["shared_expert_gate.weight"].t())
            out = out + shared
        return out


def as_levels(numbers: Tensor, *, nibbles: bool) -> LevelWeight:
    """Rounded to levels of 4 or 8 bits, 32 of which share a scale."""
    groups, most = numbers.view(len(numbers), -1, 32), 7 if nibbles else 127
    scales = (groups.abs().amax(dim=-1) / most).half()
    levels = (groups / scales.float().unsqueeze(-1)).round().clamp(-most, most).view(numbers.shape)
    if nibbles:
        return LevelWeight((levels + 8).to(torch.uint8), scales, -8 * scales, nibbles=True)
    return LevelWeight(levels.to(torch.int8), scales, torch.zeros_like(scales), nibbles=False)


def numbers(tokens: int) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_mixture_is_the_weighted_sum_of_its_experts(settings: str, attention: str) -> None:
    layer = Layer(SETTINGS[settings], attention)
    for tokens in (1, 9):
        x = numbers(tokens)
        torch.testing.assert_close(layer(x), layer.wanted(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", FORMS)
def test_no_tokens_are_no_work(attention: str) -> None:
    assert Layer(PLAIN, attention)(numbers(0)).shape == (0, HIDDEN)


@pytest.mark.skipif(DEVICE != "cpu", reason="for CPUs: a GPU sums by other tiles where tokens are more")
@pytest.mark.parametrize("attention", [form for form in FORMS if form in ("auto", "program")])
def test_no_token_depends_on_the_others(attention: str) -> None:
    layer, x = Layer(PLAIN, attention), numbers(9)
    together = layer(x)
    for place in range(9):
        assert torch.equal(layer(x[place : place + 1])[0], together[place])


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_padding_spoils_nobody() -> None:
    layer, x = Layer(SETTINGS["shared by a gate"], "triton"), numbers(9)
    rows = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    wanted = layer(x, rows)
    rows[2], x[2] = -1, float("nan")
    found = layer(x, rows)
    kept = torch.arange(9) != 2
    assert torch.equal(found[kept], wanted[kept])


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("settings", ["normalized", "biases, and a gate within limits"])
def test_float8_experts_are_near_what_rounded_weights_give(settings: str) -> None:
    import triton_cases  # noqa: F401  float8 as hardware rounds it

    layer, x = Layer(SETTINGS[settings], "triton", quantization="fp8"), numbers(6)
    torch.testing.assert_close(layer(x), layer.wanted(x, quantized=True), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_program_mixes_without_python(settings: str) -> None:
    assert Layer(SETTINGS[settings], "program").program(numbers(2)).num_calls == 0


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_a_program_mixes_levels_as_they_are_stored() -> None:
    layer, x = Layer(SETTINGS["shared"], "program", levels=True), numbers(5)
    assert layer.program(x).num_calls == 0
    torch.testing.assert_close(layer(x), layer.wanted(x), rtol=1e-4, atol=1e-3)  # rows are rounded to 16 bits


class MixedLayer(Layer):
    """As of a GGUF file that stores gates in Q4_0 and the other matrices in Q8_0."""

    def has_nibbles(self, name: str) -> bool:
        return "gate_proj" in name


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
@pytest.mark.parametrize("settings", ["shared", "biases, and a gate within limits"])
def test_a_program_mixes_experts_whose_gate_and_up_have_different_formats(settings: str) -> None:
    layer, x = MixedLayer(SETTINGS[settings], "program", levels=True), numbers(5)
    assert layer.program(x).num_calls == 0
    torch.testing.assert_close(layer(x), layer.wanted(x), rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(
    why_not_native(torch.bfloat16, torch.device("cpu")) is not None or DEVICE != "cpu", reason="no bfloat16 kernels"
)
@pytest.mark.parametrize("settings", ["shared by a gate", "biases, and a gate within limits"])
def test_a_program_mixes_bfloat16(settings: str) -> None:
    layer, x = Layer(SETTINGS[settings], "program", "bfloat16"), numbers(9).bfloat16()
    assert layer.program(x).num_calls == 0 or not has_tile_units()
    found = layer(x).float()
    torch.testing.assert_close(found, layer.wanted(x.float()), rtol=0.05, atol=0.1)


def on_ranks(size: int, settings: Experts, attention: str, x: Tensor, **given: Any) -> list[Tensor]:
    """What the layer gives on each of so many ranks that have whole experts."""

    def work(group: LocalGroup) -> Tensor:
        ranks = Ranks(ParallelConfig(tensor=size, expert=True).place(group.index), group, ONE_RANK)
        return Layer(settings, attention, ranks=ranks, **given)(x)

    return run_ranks(size, work)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_ranks_with_whole_experts_add_up_to_the_mixture(settings: str, attention: str, size: int) -> None:
    layer = Layer(SETTINGS[settings], attention)
    for tokens in (1, 9):
        x = numbers(tokens)
        for found in on_ranks(size, SETTINGS[settings], attention, x):
            torch.testing.assert_close(found, layer.wanted(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [form for form in FORMS if form in ("auto", "triton")])
@pytest.mark.parametrize("tokens", [2, 9])
def test_an_all_to_all_gives_what_an_all_reduce_does(
    tokens: int, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, called = numbers(tokens), []
    wanted = on_ranks(3, PLAIN, attention, x)
    monkeypatch.setattr(expert_sum, "LEAST_ROWS", 2)
    sum_rows = expert_sum._sum_rows
    monkeypatch.setattr(expert_sum, "_sum_rows", lambda *given: called.append(given) or sum_rows(*given))
    found = on_ranks(3, PLAIN, attention, x)
    assert len(called) == 3
    assert all(torch.equal(each, wanted[0]) for each in (*wanted, *found))


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_ranks_hold_the_levels_of_their_experts() -> None:
    settings, x = replace(PLAIN, num_used=3), numbers(5)
    wanted = Layer(settings, "program", levels=True)(x)
    for found in on_ranks(2, settings, "program", x, levels=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
