from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from peak_memory import peak_bytes
from quire.config.arguments import EngineArguments
from quire.config.embedding import EmbeddingSettings, EncoderConfig, EncoderMemory, plan_encoder_memory
from quire.config.engine import DeviceConfig
from quire.config.model import Encoder
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.relative_bias import NUM_BUCKETS, RelativeBias, _buckets
from quire.runtime.layers.split import Split
from quire.types.errors import DoesNotFit
from tests.unit.config.machines import LAPTOP, SMALL

DEVICE = DeviceConfig("cpu", "float32", "float32")


def layer() -> RelativeBias:
    made = RelativeBias("bias", Split.whole(SMALL.heads.num_query), LayerBuilder(DEVICE, SMALL.heads).placement)
    made.weight.data.copy_(torch.randn(NUM_BUCKETS, SMALL.heads.num_query, generator=torch.Generator().manual_seed(0)))
    return made


def plan(length: int, *, has_bias: bool = True, num_tokens: int = 4_096) -> EncoderMemory:
    model = replace(SMALL, encoder=Encoder(has_distance_bias=has_bias))
    config = EncoderConfig(DEVICE, length, 64, num_tokens)
    return plan_encoder_memory(EngineArguments(device="cpu"), LAPTOP, model, config, EmbeddingSettings())


@pytest.mark.parametrize("length", [1, 2, 7, 300])
def test_each_pair_of_tokens_has_the_term_of_its_distance(length: int) -> None:
    made, places = layer(), torch.arange(length)
    wanted = made.weight.data[_buckets(places - places[:, None])].permute(2, 0, 1)
    assert torch.equal(made(length)[0], wanted)


@pytest.mark.parametrize("length", [256, 512])
def test_the_plan_counts_what_the_terms_take(length: int) -> None:
    made = layer()
    with torch.inference_mode():
        taken = peak_bytes(lambda: made(length))
    planned = plan(length).bias
    assert planned <= taken <= 1.05 * planned
    assert plan(length, has_bias=False).bias == 0
    assert plan(length).total == plan(length, has_bias=False).total + planned
    assert "attention bias" in str(plan(length))


def test_an_encoder_whose_terms_do_not_fit_is_refused() -> None:
    with pytest.raises(DoesNotFit):
        plan(100_000).check()
