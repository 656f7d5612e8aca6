from __future__ import annotations

import random

import pytest

from fake_executor import VOCAB, continuation
from harness import Harness
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.request import Abort, Submit
from quire.types.sampling import SamplingParams


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("budget", [1, 16, 64])
def test_answers_do_not_depend_on_blocks_budget_or_depth(depth: int, block_size: int, budget: int) -> None:
    engine = Harness(
        num_blocks=max(2, 400 // block_size) * 2, block_size=block_size, depth=depth, max_num_batched_tokens=budget
    )
    wanted = {}
    for number, prompt in enumerate(prompts(12, 40)):
        engine.submit(f"r{number}", prompt, max_tokens=1 + 5 * number, seed=number, end_ids=(3, 5))
        wanted[f"r{number}"] = continuation(prompt, 1 + 5 * number, seed=number, end_ids=(3, 5))
    engine.run()
    assert {name: engine.answer(name) for name in wanted} == wanted
    for name, tokens in wanted.items():
        assert engine.streams[engine.handles[name]] == tokens
        sample = engine.finished[name].samples[0]
        stopped = tokens[-1] in (3, 5)
        assert (sample.finish_reason, sample.stop_reason) == (("stop", tokens[-1]) if stopped else ("length", None))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_pool_too_small_for_all_preempts_and_still_gives_the_same_answers(depth: int, block_size: int) -> None:
    engine = Harness(num_blocks=96 // block_size, block_size=block_size, depth=depth)
    for number, prompt in enumerate(prompts(10, 24, seed=1)):
        engine.submit(f"r{number}", prompt, max_tokens=60, seed=number, end_ids=(11,))
    engine.run()
    assert engine.core.stats().preemptions > 0
    assert sum(message.num_preemptions for message in engine.finished.values()) == engine.core.stats().preemptions
    for number, prompt in enumerate(prompts(10, 24, seed=1)):
        assert engine.answer(f"r{number}") == continuation(prompt, 60, seed=number, end_ids=(11,))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [30, 256])
def test_samples_share_the_prompt_and_survive_preemption_together(depth: int, num_blocks: int) -> None:
    engine = Harness(num_blocks=num_blocks, block_size=4, depth=depth, max_num_seqs=12)
    asked = prompts(4, 18, seed=2)
    for number, prompt in enumerate(asked):
        engine.submit(f"r{number}", prompt, n=3, max_tokens=20, seed=number, end_ids=(2,))
    most_shared = 0

    def watch(_: int) -> None:
        nonlocal most_shared
        most_shared = max(most_shared, engine.core.stats().blocks.shared)

    engine.run(each=watch)
    assert most_shared > 0
    assert (engine.core.stats().preemptions > 0) == (num_blocks == 30)
    for number, prompt in enumerate(asked):
        for index in range(3):
            expected = continuation(prompt, 20, seed=number, index=index, end_ids=(2,))
            assert engine.answer(f"r{number}", index) == expected


def test_the_prompt_of_n_samples_is_computed_once_and_only_a_partial_tail_is_copied() -> None:
    engine = Harness(block_size=4)
    engine.submit("a", list(range(10)), n=4, max_tokens=3)
    engine.run()
    chunks = [chunk for plan in engine.executor.plans for chunk in plan.chunks]
    copies = [copy for plan in engine.executor.plans for copy in plan.copies]
    assert sum(chunk.num_tokens for chunk in chunks) == 10
    assert len(chunks[-1].sample_rows) == 4
    assert len(copies) == 3  # the last of four holders writes in place
    assert len({copy.source for copy in copies}) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_at_any_moment_ends_that_request_once_and_disturbs_nobody(depth: int) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        engine = Harness(num_blocks=30, block_size=4, depth=depth)
        asked = prompts(9, 20, seed)
        victims = {rng.randrange(60): f"r{rng.randrange(9)}" for _ in range(4)}
        for number, prompt in enumerate(asked):
            engine.submit(f"r{number}", prompt, max_tokens=25, seed=number, n=1 + number % 2)

        def cut(step: int) -> None:
            if step in victims:  # noqa: B023
                engine.core.abort(Abort(victims[step]))  # noqa: B023
                engine.core.abort(Abort(victims[step]))  # noqa: B023

        engine.run(each=cut)
        engine.core.abort(Abort("r0"))
        engine.core.abort(Abort("never seen"))
        assert set(engine.finished) == {f"r{number}" for number in range(9)}
        assert engine.core.stats().blocks.used == 0
        for number, prompt in enumerate(asked):
            for sample in engine.finished[f"r{number}"].samples:
                full = continuation(prompt, 25, seed=number, index=sample.index)
                if sample.finish_reason == "abort":
                    assert f"r{number}" in victims.values()
                    assert list(sample.token_ids) == full[: len(sample.token_ids)]
                else:
                    assert list(sample.token_ids) == full


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_string_ends_one_sample_and_the_others_go_on(depth: int) -> None:
    engine = Harness(depth=depth)
    engine.submit("a", [1, 2, 3], n=2, max_tokens=10, seed=1)
    for _ in range(4):
        engine.step()
    engine.core.abort(Abort("a", index=0, stop_reason="END"))
    engine.run()
    first, second = engine.finished["a"].samples
    assert (first.finish_reason, first.stop_reason) == ("stop", "END")
    assert len(first.token_ids) < 10
    assert list(second.token_ids) == continuation([1, 2, 3], 10, seed=1, index=1)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_the_sample_that_computes_the_prompt_may_be_ended_before_it_is_done(depth: int, steps: int) -> None:
    engine = Harness(depth=depth, max_num_batched_tokens=8)
    engine.submit("a", list(range(20)), n=3, max_tokens=6, seed=1)
    for _ in range(steps):
        engine.step()
    engine.core.abort(Abort("a", index=0))
    engine.core.abort(Abort("a", index=1))
    engine.run()
    assert engine.answer("a", 2) == continuation(list(range(20)), 6, seed=1, index=2)


def test_no_token_after_a_stop_is_ever_shown_at_any_depth() -> None:
    for depth in (1, 2, 4):
        engine = Harness(depth=depth)
        engine.submit("a", [4, 4], max_tokens=60, seed=9, end_ids=tuple(range(20)))
        engine.submit("b", [5], max_tokens=60, seed=9, end_ids=tuple(range(20)))
        engine.run()
        for name, prompt in (("a", [4, 4]), ("b", [5])):
            expected = continuation(prompt, 60, seed=9, end_ids=range(20))
            assert engine.streams[engine.handles[name]] == expected == engine.answer(name)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_row_ends_its_request_alone(depth: int) -> None:
    engine = Harness(depth=depth)
    engine.executor.poison.add(96)
    engine.submit("good", [1, 2], max_tokens=12, seed=1)
    engine.submit("bad", [96, 2], n=2, max_tokens=12, seed=1)
    engine.submit("also good", [7], max_tokens=12, seed=2)
    engine.run()
    assert engine.finished["bad"].error == "poisoned"
    assert {sample.finish_reason for sample in engine.finished["bad"].samples} == {"error"}
    assert engine.answer("good") == continuation([1, 2], 12, seed=1)
    assert engine.answer("also good") == continuation([7], 12, seed=2)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_lost_executor_ends_every_request_with_an_error_and_refuses_new_ones(depth: int) -> None:
    engine = Harness(depth=depth)
    engine.executor.crash_at = 5
    for number, prompt in enumerate(prompts(10, 10)):
        engine.submit(f"r{number}", prompt, max_tokens=50)
    engine.run()
    assert len(engine.finished) == 10
    assert all("device lost" in (message.error or "") for message in engine.finished.values())
    with pytest.raises(EngineDead, match="device lost"):
        engine.submit("late", [1])


def test_an_error_inside_one_requests_last_message_is_that_requests_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.engine.decoding.group import Group

    original = Group.finish_message

    def fragile(group: Group, error: str | None = None) -> object:
        if group.request.request_id == "bad":
            raise ZeroDivisionError("its own fault")
        return original(group, error)

    monkeypatch.setattr(Group, "finish_message", fragile)
    engine = Harness()
    engine.submit("bad", [1], max_tokens=3, seed=1)
    engine.submit("good", [2], max_tokens=6, seed=1)
    engine.run()
    assert "its own fault" in (engine.finished["bad"].error or "")
    assert engine.answer("good") == continuation([2], 6, seed=1)


def test_the_oldest_request_is_never_preempted() -> None:
    engine = Harness(num_blocks=20, block_size=4, max_model_len=80)
    engine.submit("oldest", [1] * 10, max_tokens=68, seed=0)
    for number in range(12):
        engine.submit(f"young{number}", [number] * 8, max_tokens=40, seed=0)
    engine.run()
    assert engine.finished["oldest"].num_preemptions == 0
    assert sum(message.num_preemptions for message in engine.finished.values()) > 0


def test_a_full_pool_request_runs_alone_to_its_last_token() -> None:
    engine = Harness(num_blocks=8, block_size=4, max_model_len=33)
    engine.submit("whole", [1] * 9, max_tokens=None, seed=0)
    engine.submit("next", [2] * 9, max_tokens=None, seed=0)
    engine.run()
    assert engine.answer("whole") == continuation([1] * 9, 24)
    assert engine.answer("next") == continuation([2] * 9, 24)


@pytest.mark.parametrize(
    ("field", "prompt", "params"),
    [
        ("prompt", [], {}),
        ("prompt", [1] * 512, {}),
        ("prompt", [1, VOCAB], {}),
        ("prompt", [-1], {}),
        ("n", [1], {"n": 9}),
        ("max_tokens", [1] * 100, {"max_tokens": 300}),
        ("max_tokens", [1] * 10, {"max_tokens": 60, "n": 8}),
        ("allowed_token_ids", [1], {"allowed_token_ids": [VOCAB]}),
        ("logit_bias", [1], {"logit_bias": {VOCAB: 1.0}}),
    ],
)
def test_what_could_never_run_is_refused_at_submission(
    field: str, prompt: list[int], params: dict[str, object]
) -> None:
    engine = Harness(num_blocks=64, block_size=4)
    with pytest.raises(InvalidRequest) as refusal:
        engine.submit("a", prompt, **params)
    assert refusal.value.field == field
    assert not engine.core.has_work
    engine.core.check()


def test_a_request_id_in_use_is_refused() -> None:
    engine = Harness()
    engine.submit("a", [1])
    with pytest.raises(InvalidRequest, match="in use"):
        engine.submit("a", [1])


def test_a_priority_is_refused_where_it_means_nothing() -> None:
    engine = Harness()
    with pytest.raises(InvalidRequest, match="priority"):
        engine.core.submit(Submit("a", (1,), SamplingParams(), priority=1))


def test_steps_mix_prompt_chunks_with_decodes_within_the_budget() -> None:
    engine = Harness(max_num_batched_tokens=16)
    for number in range(6):
        engine.submit(f"r{number}", [number + 1] * 30, max_tokens=20)
    engine.run()
    plans = engine.executor.plans
    assert all(plan.num_tokens <= 16 for plan in plans)
    assert any(len(plan.decode_rows) and plan.chunks for plan in plans)


def test_unseeded_requests_draw_from_the_engines_seed() -> None:
    def run(seed: int) -> list[list[int]]:
        engine = Harness(seed=seed)
        engine.submit("a", [1])
        engine.submit("b", [1])
        engine.run()
        return [engine.answer("a"), engine.answer("b")]

    assert run(1) == run(1) != run(2)
    assert run(1)[0] != run(1)[1]


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_with_arrivals_aborts_and_scarcity_end_whole_at_depth_one_and_two(seed: int) -> None:
    def run(depth: int) -> dict[str, list[list[int]]]:
        rng = random.Random(seed)
        engine = Harness(
            num_blocks=rng.choice([24, 48, 200]), block_size=rng.choice([1, 2, 5, 8]), depth=depth,
            max_num_batched_tokens=rng.choice([3, 17, 64]), max_num_seqs=rng.choice([3, 6, 16]),
        )  # fmt: skip
        asked: dict[str, tuple[list[int], int, int]] = {}
        arrivals = sorted(rng.randrange(80) for _ in range(20))
        plans = [(rng.randint(1, 20), rng.randint(1, 12), rng.randint(1, 3)) for _ in arrivals]

        def arrive(step: int) -> None:
            while arrivals and arrivals[0] <= step:
                arrivals.pop(0)
                length, outputs, n = plans.pop()
                name, prompt = f"r{len(plans)}", [(len(plans) * 7 + i) % VOCAB for i in range(length)]
                try:
                    engine.submit(name, prompt, max_tokens=outputs, n=n, seed=len(plans), end_ids=(1, 50))
                    asked[name] = (prompt, outputs, n)
                except InvalidRequest:
                    pass

        step = 0
        while arrivals or engine.core.has_work:
            arrive(step)
            engine.step()
            step += 1
            assert step < 5_000
        for name, (prompt, outputs, n) in asked.items():
            for index in range(n):
                wanted = continuation(prompt, outputs, seed=int(name[1:]), index=index, end_ids=(1, 50))
                assert engine.answer(name, index) == wanted
        assert engine.core.stats().blocks.used == 0
        return {name: [list(s.token_ids) for s in message.samples] for name, message in engine.finished.items()}

    assert run(1) == run(2)
