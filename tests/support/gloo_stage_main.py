"""One stage of a pipeline in a process of its own, over Gloo: `python gloo_stage_main.py STAGE STAGES STORE`. The last
stage prints the tokens of all steps. Before these, it sends something else to the first stage, which that stage reads
last: tokens do not wait for it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from quire.config.parallel import ParallelConfig
from quire.config.stages import stage_model
from quire.runtime.executor.life import PAGE_BYTES, LifePage
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.parallel.make import make_ranks
from quire.runtime.worker.worker import Worker
from staged_executor import load_model
from staged_plans import CHECKPOINT, CONFIG, PLANS
from tiny_models import GreedySampler


def main() -> None:
    stage, num_stages, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=stage, world_size=num_stages)
    config = replace(CONFIG, parallel=ParallelConfig(pipeline=num_stages))
    place = config.parallel.place(stage)
    model_config = stage_model(CHECKPOINT.config, place)
    builder = LayerBuilder(config.device, model_config.heads, config.cache.block_size)
    ranks = make_ranks(place, "gloo", 30.0, LifePage(bytearray(PAGE_BYTES)))
    model = load_model(CHECKPOINT, builder, model_config)
    worker = Worker(model, builder.backend, GreedySampler(), model_config, config, ranks=ranks)
    if place.is_last_stage:
        ranks.pipeline.send(torch.full((3,), 7), 0)
    tokens = [worker.execute(plan).token_ids.tolist() for plan in PLANS]
    worker.check()
    if place.is_first_stage:
        assert ranks.pipeline.receive(torch.empty(3, dtype=torch.int64), num_stages - 1).tolist() == [7, 7, 7]
    dist.barrier()
    if place.is_last_stage:
        print(json.dumps(tokens))


if __name__ == "__main__":
    main()
