"""The layouts of the KV cache, and with what they cannot be had together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config.arguments import EngineArguments
from quire.config.engine import EngineConfig
from quire.config.facts import HardwareFacts
from quire.config.model import Latent, ModelConfig
from quire.config.resolve import resolve_engine_config
from quire.types.errors import ConfigError
from tests.unit.config.machines import LAPTOP, LARGE, SERVER, SMALL


def resolve(machine: HardwareFacts, model: ModelConfig, **settings: object) -> EngineConfig:
    arguments = EngineArguments(**{"kv_layout": "virtual", "max_model_len": 512, **settings})  # type: ignore[arg-type]
    return resolve_engine_config(arguments, machine, model)[0]


def test_the_cache_is_paged_unless_something_else_is_asked_for() -> None:
    config = resolve(LAPTOP, SMALL, kv_layout="paged")
    assert (config.cache.layout, config.device.attention_backend) == ("paged", "auto")


def test_the_virtual_layout_brings_its_own_attention() -> None:
    config = resolve(LAPTOP, SMALL)
    assert (config.cache.layout, config.device.attention_backend) == ("virtual", "virtual")


def test_a_block_of_a_large_model_is_one_page_of_a_gpu() -> None:
    assert resolve(SERVER, LARGE).cache.block_size == 16


@pytest.mark.parametrize(
    ("machine", "model", "settings", "named"),
    [
        (LAPTOP, SMALL, {"kv_layout": "contiguous"}, 'kv_layout: .* use "paged" or "virtual"'),
        (LAPTOP, SMALL, {"attention_backend": "gather"}, "attention_backend: 'gather' reads a paged cache"),
        (LAPTOP, SMALL, {"kv_layout": "paged", "attention_backend": "virtual"}, "attention_backend: "),
        (LAPTOP, SMALL, {"kv_layout": "paged", "attention_backend": "foo"}, "attention_backend: 'foo' is unknown"),
        (LAPTOP, SMALL, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype: float8"),
        (LAPTOP, SMALL, {"kv_cache_dtype": "int4"}, 'kv_cache_dtype: int4 .* use "auto", or kv_layout="paged"'),
        (LAPTOP, SMALL, {"block_size": 1}, "block_size: .*1 tokens of 46,080 bytes .* use 4 or a multiple"),
        (SERVER, LARGE, {"block_size": 8}, "block_size: .*pages of 2.00 MiB; use 16 or a multiple"),
        (LAPTOP, replace(SMALL, latent=Latent(32, 16, 8, 16)), {}, 'kv_layout: "virtual" .* latents; use "paged"'),
        (SERVER, SMALL, {}, 'block_size: .*no size is; use kv_layout="paged"'),
        (replace(LAPTOP, page_size=1 << 16), SMALL, {"block_size": 16}, "use 64 or a multiple"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    machine: HardwareFacts, model: ModelConfig, settings: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        resolve(machine, model, **settings)
