from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.engine import token_buckets
from quire.config.model import Heads
from tiny_models import engine_config, tiny_config


def test_small_models_are_captured_up_to_the_token_budget_and_large_ones_for_short_steps() -> None:
    config = engine_config()
    tiny = token_buckets(tiny_config(), config)
    assert tiny[:5] == (16, 32, 48, 64, 128)
    assert tiny[-2:] == (1920, 2048)
    sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_layers": 32, "vocab_size": 128_256}
    large = token_buckets(tiny_config("llama", **sizes, heads=Heads(32, 8, 128)), config)
    assert 1024 < large[-1] < 2048
    for quantization in ("fp8", "int8"):  # both run faster
        small = replace(config, device=replace(config.device, quantization=quantization))
        assert token_buckets(tiny_config("llama", **sizes, heads=Heads(32, 8, 128)), small)[-1] == 2048


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ({"hidden_size": 1536, "intermediate_size": 8960, "num_layers": 28}, Heads(12, 2, 128)),  # 1.5B
        ({"hidden_size": 2048, "intermediate_size": 11_008, "num_layers": 36}, Heads(16, 2, 128)),  # 3B
    ],
)
def test_prompt_steps_of_models_whose_launches_take_longer_than_their_kernels_are_captured_up_to_4096_tokens(
    sizes: dict[str, int], heads: Heads
) -> None:
    config = engine_config()
    config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=4_096))
    model = tiny_config("qwen2", **sizes, heads=heads, vocab_size=151_936, tie_word_embeddings=True)
    assert token_buckets(model, config)[-1] == 4_096


def test_the_largest_bucket_holds_a_step_of_the_whole_budget_that_is_not_a_bucket() -> None:
    config = engine_config()
    uneven = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=1_000))
    assert token_buckets(tiny_config(), uneven)[-1] == 1_024
