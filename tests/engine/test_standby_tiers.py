"""Commands wait for the copies and deletions of the tiers, and these go on while no step may be computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from family_models import FamilyCase
from quire.config.tiers import TierConfig
from quire.runtime.loading.files import files_at
from quire.types.errors import QuireError
from quire.types.standby import Command, StandbyState
from worker_executor import TinyEngine

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [list(range(3, 40)), list(range(20, 60))]
MOST_STEPS = 2_000


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
    return FamilyCase("llama", tmp_path_factory.mktemp("model"))


def engine(case: FamilyCase, tiers: TierConfig) -> TinyEngine:
    checkpoint: Any = case.checkpoint()
    return TinyEngine(checkpoint, files=files_at(case.directory), tiers=tiers)


def carry_out(made: TinyEngine, command: Command) -> StandbyState:
    """Run the engine until the command is carried out."""
    results: list[StandbyState | QuireError] = []
    made.core.standby.begin(command, results.append)
    for _ in range(MOST_STEPS):
        if results:
            break
        if made.core.has_work:
            out = made.core.step()
            made.finished |= {message.request_id: message for message in out.finished}
        made.core.standby.advance()
    assert made.core.dead is None
    assert results, f"{command.action} was not carried out"
    assert isinstance(results[0], StandbyState), results[0]
    return results[0]


@pytest.mark.parametrize("level", [1, 2])
def test_a_cache_that_is_emptied_while_the_engine_sleeps_does_not_keep_it_from_new_weights(
    level: int, case: FamilyCase, tmp_path: Path
) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir(mode=0o700)
    made = engine(case, TierConfig(host_blocks=64, disk_path=str(folder), disk_blocks=64, write="through"))
    before = made.answers(PROMPTS)
    carry_out(made, Command("sleep", level=level))
    made.core.reset_cache()
    assert made.core._scheduler.tiers.has_transfers, "no file is to be deleted"
    assert carry_out(made, Command("sleep", level=2)).sleep_level == 2
    carry_out(made, Command("wake_up"))
    carry_out(made, Command("pause"))
    made.core.reset_cache()
    assert carry_out(made, Command("update_weights")).has_weights
    carry_out(made, Command("resume"))
    assert made.answers(PROMPTS) == before
    made.executor.close()


def test_an_engine_that_is_paused_with_requests_saves_their_blocks_and_then_sleeps(case: FamilyCase) -> None:
    made = engine(case, TierConfig(host_blocks=64, write="through"))
    for number, prompt in enumerate(PROMPTS):
        made.submit(f"r{number}", prompt)
    made.core.standby.begin(Command("pause", mode="keep"), lambda _: None)
    while not made.core._scheduler.tiers.has_transfers:
        made.core.standby.begin(Command("resume"), lambda _: None)
        made.core.step()
        made.core.standby.begin(Command("pause", mode="keep"), lambda _: None)
        if not made.core.has_work:
            pytest.fail("no block waited to be saved")
    assert carry_out(made, Command("sleep", mode="abort")).is_sleeping
    assert not made.core.has_work
    made.executor.close()


def test_a_dead_engine_that_sleeps_plans_no_transfers(case: FamilyCase, tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir(mode=0o700)
    made = engine(case, TierConfig(host_blocks=64, disk_path=str(folder), disk_blocks=64, write="through"))
    made.answers(PROMPTS)
    carry_out(made, Command("sleep"))
    made.core.reset_cache()
    assert made.core._scheduler.tiers.has_transfers
    made.core._die(RuntimeError("the executor is gone"))
    assert made.core._plan_step() is None
    made.executor.close()
