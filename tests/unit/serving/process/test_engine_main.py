"""The engine process with a real, tiny model."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine_thread import PlainEdge
from quire import LLM, SamplingParams
from quire.config.arguments import EngineArguments
from quire.config.server import ModelSource, ServerConfig
from quire.runtime.hardware import detect_hardware
from quire.serving.process import engine_process
from quire.serving.process.child_process import ChildProcess
from quire.serving.process.control import ControlMessage, EngineStart, EngineUp, Fatal, LoadProgress, Stop

PATIENCE = 240.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "eos_token_id": 3,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
ARGUMENTS = EngineArguments(threads=1, num_kv_blocks=32, max_num_seqs=4, seed=5, dtype="float32")


class Engine:
    """An engine process and its supervisor's end."""

    def __init__(self, model: Path, directory: Path, generation: int = 1) -> None:
        source = ModelSource(model=str(model), load_format="dummy")
        self.child = ChildProcess("quire.serving.process.engine_main")
        config = ServerConfig(source=source, engine=ARGUMENTS)
        self.child.send(EngineStart(config, generation, f"ipc://{directory}/engine", str(directory)))
        self.heard: list[ControlMessage] = []

    def wait(self, kind: type[ControlMessage]) -> ControlMessage:
        deadline = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            selector.register(self.child, selectors.EVENT_READ)
            while not (found := [said for said in self.heard if isinstance(said, kind)]):
                assert time.monotonic() < deadline
                assert not self.child.has_ended or self.child.receive(), self.heard
                selector.select(0.1)
                self.heard.extend(self.child.receive())
        return found[0]

    def wait_exit(self) -> str:
        deadline = time.monotonic() + PATIENCE
        while not self.child.has_ended:
            assert time.monotonic() < deadline
            self.child.receive()
            time.sleep(0.01)
        return self.child.reap()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(model, tmp_path)
    yield made
    made.child.kill()
    made.child.reap()


def test_the_engine_process_answers_as_the_offline_engine_does(model: Path, engine: Engine) -> None:
    up = engine.wait(EngineUp)
    assert isinstance(up, EngineUp)
    ready = up.ready
    assert (ready.generation, ready.vocab_size, ready.num_blocks, ready.eos_ids) == (1, 64, 32, (3,))
    assert any(isinstance(said, LoadProgress) for said in engine.heard)
    edge = PlainEdge(up.address)
    prompts = [[1, 5, 9], [7] * 40]
    for number, prompt in enumerate(prompts):
        edge.submit(str(number), prompt, temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    edge.wait(lambda: len(edge.ends()) == 2)
    edge.close()
    engine.child.send(Stop())
    assert engine.wait_exit() == "exited with code 0"
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(
        str(model), load_format="dummy", skip_tokenizer_init=True, threads=1, num_kv_blocks=32, seed=5, dtype="float32"
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    expected = [output.outputs[0].token_ids for output in outputs]
    assert [list(edge.ends()[str(number)].samples[0].token_ids) for number in range(2)] == expected
    assert len(edge.ends()["0"].samples[0].logprobs) == 12


def test_a_model_that_is_refused_is_told_in_one_line_and_not_tried_again(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "unheard-of", "architectures": ["What"]}))
    engine = Engine(model, tmp_path)
    fatal = engine.wait(Fatal)
    assert isinstance(fatal, Fatal)
    assert "What" in fatal.reason
    assert "\n" not in fatal.reason
    assert not fatal.retry
    assert engine.wait_exit() == "exited with code 71"


@pytest.mark.parametrize("refusal", [None, "its instructions are not those of this CPU"])
def test_kernels_that_this_cpu_refuses_are_named_in_the_log(
    refusal: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "quire.engine"):
        engine_process.warn_of_refusal(replace(detect_hardware(), native_refusal=refusal))
    lines = [f"slower than it could be: {refusal}; `quire doctor` names the fix"] if refusal else []
    assert [record.getMessage() for record in caplog.records] == lines


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process when its parent ends")
def test_the_process_ends_with_its_parent_also_while_it_imports_torch() -> None:
    program = """
import ctypes, signal, sys, types
from quire.serving.process import engine_main

def run_engine(*_):
    asked = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(asked))  # PR_GET_PDEATHSIG
    return 0 if asked.value == signal.SIGKILL else 1

late = types.ModuleType("quire.serving.process.engine_process")
late.import_ahead = late.load_engine = None
late.run_engine = run_engine
sys.modules[late.__name__] = late
sys.exit(engine_main.main(["9"]))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=PATIENCE).returncode == 0
