"""Rotary tables against transformers' own, and against the plain formula."""

from __future__ import annotations

import pytest
import torch

from quire.config.model import Rope
from quire.kernels.reference.elementwise import rotate as plain_rotate
from quire.runtime.layers.ops import TorchOps, choose_ops
from quire.runtime.layers.rotary import Rotary, dynamic_frequencies, frequencies
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.weights import Placement
from quire.types.errors import ConfigError
from tiny_models import tiny_config, transformers_model

CPU = Placement(torch.float32, torch.device("cpu"))
SCALED = {
    "default": Rope(theta=500.0),
    "linear": Rope(kind="linear", scaling=(("factor", 3.0),)),
    "llama3": Rope(
        theta=10_000.0,
        kind="llama3",
        scaling=(
            ("factor", 8.0),
            ("low_freq_factor", 1.0),
            ("high_freq_factor", 4.0),
            ("original_max_position_embeddings", 64.0),
        ),
        max_position=512,
    ),
    "yarn": Rope(kind="yarn", scaling=(("factor", 4.0), ("original_max_position_embeddings", 64.0)), max_position=256),
    "yarn with betas and magnitude": Rope(
        kind="yarn",
        scaling=(
            ("factor", 16.0),
            ("beta_fast", 20.0),
            ("beta_slow", 2.0),
            ("mscale", 0.7),
            ("mscale_all_dim", 1.2),
            ("original_max_position_embeddings", 64.0),
        ),
        max_position=1_024,
    ),
    "yarn with attention_factor": Rope(
        kind="yarn",
        scaling=(("factor", 4.0), ("attention_factor", 1.5), ("original_max_position_embeddings", 64.0)),
        max_position=256,
    ),
}


def step(positions: list[int], lengths: list[int] | None = None) -> ForwardStep:
    lengths = lengths or [position + 1 for position in positions]
    empty = torch.empty(0)
    return ForwardStep(empty, torch.tensor(positions), torch.tensor(lengths), max(lengths), empty, (), None, None)


@pytest.mark.parametrize("name", SCALED)
def test_cos_and_sin_equal_those_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    config = tiny_config(rope=SCALED[name])
    positions = [0, 1, 5, 63, 64, 200, 255]
    theirs = transformers_model(config).model.rotary_emb
    cos, sin = theirs(torch.zeros(1), torch.tensor([positions]))
    ours = Rotary(config.rope, config.heads.dim, CPU)(step(positions))
    half = config.heads.dim // 2
    torch.testing.assert_close(ours.cos[:, 0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.sin[:, 0, half:], sin[0, :, half:], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.sin[:, 0, :half], -sin[0, :, :half], rtol=0, atol=1e-6)


def test_rotation_is_the_plain_formula() -> None:
    rotary = Rotary(Rope(), 8, CPU)
    rotation = rotary(step([3, 0, 9]))
    x = torch.randn(3, 5, 8)
    expected = plain_rotate(x, rotation.cos[:, 0, :4], rotation.sin[:, 0, 4:])
    for ops in (TorchOps(), choose_ops(CPU.dtype, CPU.device)):
        rotated = ops.rotate(x.clone(), rotation.cos, rotation.sin)
        torch.testing.assert_close(rotated, expected)


def test_the_table_grows_when_a_longer_sequence_comes() -> None:
    rotary = Rotary(Rope(), 8, CPU)
    rotary(step([4]))
    far = rotary(step([5_000]))
    angles = 5_000 * frequencies(Rope(), 8)[0]
    torch.testing.assert_close(far.cos[0, 0, :4], angles.cos())


def test_dynamic_scaling_starts_past_the_trained_length_and_follows_each_sequence() -> None:
    rope = Rope(kind="dynamic", scaling=(("factor", 2.0),), max_position=16)
    plain, _ = frequencies(Rope(), 8)
    scaled = dynamic_frequencies(rope, 8, torch.tensor([4, 16, 32]))
    torch.testing.assert_close(scaled[0], plain)
    torch.testing.assert_close(scaled[1], plain)
    assert (scaled[2, 1:] < plain[1:]).all()
    mixed = Rotary(rope, 8, CPU)(step([2, 2], lengths=[3, 32]))
    assert torch.equal(mixed.cos[0, 0, :4], (2 * plain).cos())
    assert not torch.equal(mixed.cos[0], mixed.cos[1])


def test_frequency_factors_divide_the_plain_frequencies() -> None:
    plain, _ = frequencies(Rope(), 8)
    divided, _ = frequencies(Rope(frequency_factors=(1.0, 2.0, 4.0, 8.0)), 8)
    torch.testing.assert_close(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_a_scaling_without_its_parameters_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="llama3 needs factor"):
        frequencies(Rope(kind="llama3"), 8)
