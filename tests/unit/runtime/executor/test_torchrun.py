"""Ranks started by torchrun: every process runs the same script and gets the same outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adapter_files import PREFIX, write_adapter
from quire.config.parallel import ParallelConfig
from quire.runtime.executor.torchrun import check_torchrun
from quire.types.errors import ConfigError
from tiny_served import write_tiny_model

SIZES = {"A": (4, 32), "B": (32, 4)}
PROGRAM = """
import json, os, sys, time
from quire import LLM, SamplingParams
from quire.runtime.adapters.reader import AdapterReader
from quire.serving.lora import LoRARequest
model, out, ranks = sys.argv[1:]
rank = os.environ.get("RANK", "alone")
read = AdapterReader.read
def read_late(self, folder):
    time.sleep(0.3)
    return read(self, folder)
if rank == "1":
    AdapterReader.read = read_late  # a rank whose disk is slow must not plan other steps
if ranks == "2":
    import torch.distributed as dist
    dist.init_process_group("gloo")
settings = {"executor": "torchrun", "tensor_parallel_size": 2} if ranks == "2" else {}
settings |= {"load_format": "dummy", "dtype": "float32", "device": "cpu", "max_num_seqs": 3, "num_kv_blocks": 64}
settings |= {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}
with LLM(model, **settings) as llm:
    sampling = [SamplingParams(temperature=n % 2, max_tokens=6 + n) for n in range(6)]
    sampling[4] = SamplingParams(max_tokens=8, structured_outputs={"regex": "[ab]{3,9}"})
    prompts = [f"prompt {n}" * (n + 1) for n in range(6)]
    loras = [LoRARequest(name, number, f"{out}/{name}") for number, name in enumerate("abc", 1)]
    outputs = [*llm.generate(prompts, sampling), *llm.generate(prompts, sampling, lora_request=loras + loras)]
if ranks == "2":
    dist.barrier()  # the script's own group, which the engine has left as it was
    dist.destroy_process_group()
with open(f"{out}/{rank}.json", "w") as file:
    json.dump([list(output.outputs[0].token_ids) for output in outputs], file)
"""


def test_every_rank_gets_the_outputs_of_one_process_including_adapters(tmp_path: Path) -> None:
    model, script = write_tiny_model(tmp_path / "model"), tmp_path / "script.py"
    script.write_text(PROGRAM)
    for number, name in enumerate("abc"):
        generator = torch.Generator().manual_seed(number)
        layer = f"{PREFIX}model.layers.0.self_attn.q_proj."
        parts = {f"{layer}lora_{part}.weight": torch.randn(*size, generator=generator) for part, size in SIZES.items()}
        write_adapter(
            tmp_path / name, {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "q_proj"}, parts
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    for command, ranks in (([sys.executable], "1"), (torchrun, "2")):
        subprocess.run(
            [*command, str(script), str(model), str(tmp_path), ranks], env=environment, check=True, timeout=300
        )
    alone, *others = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", 0, 1))
    assert others == [alone, alone]


HALTS = """
import os, signal, sys
from quire import LLM, SamplingParams
from quire.runtime.executor.torchrun import TorchrunExecutor
model, out, where = sys.argv[1:]
settings = {"executor": "torchrun", "tensor_parallel_size": 2, "rank_timeout": 5, "load_format": "dummy"}
launch = TorchrunExecutor.launch
def launch_or_halt(self, plan):
    if plan.step == 6 and os.environ["RANK"] == "1":
        with open(f"{out}/pid", "w") as file:
            file.write(str(os.getpid()))
        if where == "before":
            os.kill(os.getpid(), signal.SIGSTOP)
        self.ranks.tensor._group.all_reduce = lambda x: os.kill(os.getpid(), signal.SIGSTOP)
    launch(self, plan)
TorchrunExecutor.launch = launch_or_halt
with LLM(model, **settings, dtype="float32", device="cpu", max_num_seqs=3, num_kv_blocks=64) as llm:
    try:
        llm.generate("a", SamplingParams(max_tokens=20, ignore_eos=True))
    except Exception as error:
        with open(f"{out}/error", "w") as file:
            file.write(str(error))
        os.kill(int(open(f"{out}/pid").read()), signal.SIGKILL)  # torchrun would wait for it
"""


@pytest.mark.parametrize("where", ["before", "in"])
def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path: Path, where: str) -> None:
    model, script = write_tiny_model(tmp_path / "model"), tmp_path / "script.py"
    script.write_text(HALTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    found = subprocess.run(
        [*torchrun, str(script), str(model), str(tmp_path), where], env=environment, check=False, timeout=300
    )
    assert found.returncode, "torchrun must report the rank that was killed"
    assert f"rank 1 of 2 is gone or hangs {where} step 6" in (tmp_path / "error").read_text()


def test_processes_that_torchrun_did_not_start_are_refused() -> None:
    config = ParallelConfig(2, executor="torchrun")
    check_torchrun(config, 2)
    with pytest.raises(ConfigError, match=r"^executor: .*run `torchrun --nproc-per-node 2 SCRIPT`"):
        check_torchrun(config, None)
    with pytest.raises(ConfigError, match="^tensor_parallel_size: torchrun started 3 processes, and there are 2 ranks"):
        check_torchrun(config, 3)
