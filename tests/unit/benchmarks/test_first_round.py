"""First rounds beside later ones: what an engine's thread was doing, and what is refused."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import first_round
from benchmarks.gpu.stack_sampler import CAPTURE, OTHER, StackSampler, kind_of, place_of

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_act": "silu",
    "vocab_size": 12_000, "max_position_embeddings": 4_096, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SETTINGS = '{"device": "cpu", "threads": 1, "max_num_seqs": 8, "num_kv_blocks": 600}'


def frames(*calls: tuple[str, str]) -> FrameType:
    """The innermost frame of a stack of calls, each a file and a function, the outermost first."""
    found: list[FrameType] = []

    def keep() -> None:
        found.append(sys._getframe(1))

    inner: Callable[[], None] = keep
    for file, function in reversed(calls):
        scope: dict[str, Callable[[], None]] = {"inner": inner}
        exec(compile(f"def {function}():\n    inner()", file, "exec"), scope)
        inner = scope[function]
    inner()
    return found[0]


ENGINE = ("/lib/quire/runtime/executor/single.py", "launch")
RECORD = ("/lib/quire/runtime/worker/capture.py", "record")
BUILD = ("/lib/triton/runtime/build.py", "_build")
LOAD = ("/lib/triton/compiler/compiler.py", "_init_handles")


@pytest.mark.parametrize(
    ("calls", "kind"),
    [
        ([ENGINE], "launch"),
        ([ENGINE, LOAD], "module load"),
        ([ENGINE, LOAD, BUILD], "launcher build"),
        ([ENGINE, RECORD], CAPTURE.kind),
        ([ENGINE, RECORD, LOAD, BUILD], "capture: launcher build"),
        ([("/lib/any.py", "main")], OTHER),
    ],
)
def test_the_innermost_call_of_a_kind_decides_and_a_capture_around_it_is_named(
    calls: list[tuple[str, str]], kind: str
) -> None:
    assert kind_of(frames(*calls)) == kind


def test_places_are_the_innermost_ones_in_our_code() -> None:
    assert place_of(frames(ENGINE, ("/lib/torch/nn.py", "forward"), RECORD, BUILD)) == (
        "runtime/worker/capture.py:2 record < runtime/executor/single.py:2 launch"
    )


def test_a_sampler_accounts_for_the_time_of_its_thread() -> None:
    with StackSampler(interval=0.001) as sampler:
        threading.Event().wait(0.05)
    assert 0.02 < sum(sampler.seconds.values()) < 5
    assert set(sampler.seconds) == {OTHER}


@pytest.fixture
def restored_log() -> Iterator[None]:
    log = first_round.logging.getLogger("quire.runtime")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.mark.usefixtures("restored_log")
def test_every_row_runs_twice_and_a_table_holds_both_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_round, "set_variables", lambda **_: None)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    out = tmp_path / "out.json"
    given = ["--model", str(tmp_path), "--rows", "batch1", "--no-warm-up", "--settings", SETTINGS, "--json", str(out)]
    first_round.main(given)
    rounds = json.loads(out.read_text())["rounds"]
    assert {row: len(found) for row, found in rounds.items()} == {"start": 1, "batch1": 2}
    assert "| batch1 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--rows", "nano,none"], "unknown rows none"),
        (["--repeats", "1"], "--repeats must be at least 2"),
        (["--model", "nowhere"], "--model nowhere is neither"),
    ],
)
def test_what_cannot_be_run_is_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        first_round.main(given)
    assert message in capsys.readouterr().err
