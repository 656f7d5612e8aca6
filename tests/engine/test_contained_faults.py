"""A fault in any call that the engine makes for one request ends that request, and no other hears of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fuzz_faults import MEMBERS, Fault, spoil
from fuzz_grammars import REAL_GRAMMARS, FuzzGrammars, real_answer, real_matcher
from harness import VOCABULARY, Harness
from quire.config.tiers import TierConfig
from quire.engine.core import EngineCore
from quire.engine.decoding.controller import PLAIN
from quire.engine.decoding.controller import Fault as RequestFault
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.group import Group
from quire.engine.decoding.mask_table import MaskTable
from quire.engine.decoding.tools import DecodingTools
from quire.engine.speculation.proposer import NO_PROPOSER
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.request import Abort
from toy_decoding import BeamQuestion, ToyGrammars, ToyMatcher, ToyProposers, beam_answers, grammar_answer
from toy_model import VOCAB, continuation

pytest.importorskip("llguidance")
DRAFTED = 100  # the seed from which on toy drafts are proposed
KINDS: dict[str, dict[str, object]] = {
    "plain": {"n": 2},
    "drafts": {"seed": DRAFTED, "n": 2},
    "one draft": {"seed": DRAFTED},
    "constrained drafts": {"seed": DRAFTED, "grammar": "a"},
    "guided": {"grammar": REAL_GRAMMARS[4]},
    "ranked": {"best_of": 2, "stop": "e"},
    "beams": {"beam": BeamRules(3), "grammar": "h", "n": 2},
}
KIND_OF = {
    "group": "plain",
    "ledger": "plain",
    "stops": "ranked",
    "search": "beams",
    "compilation": "guided",
    "proposer": "drafts",
    "controller": "drafts",
    "matcher": "guided",
    "controller.ending_with": "beams",
    "controller.clone": "beams",
    "controller.look_for_forced": "guided",
    "matcher.clone": "beams",
    "matcher.rollback": "constrained drafts",
}  # the kind of request that reaches a part, or one of its members
CALLS = [f"{part}.{member}" for part, members in MEMBERS.items() for member in members]
CALLS.remove("proposer.clone")  # it comes before a request is accepted
CASES = [(call, KIND_OF.get(call, KIND_OF[call.split(".")[0]]), 0) for call in CALLS]
CASES += [
    ("controller.close", "beams", 0),
    ("proposer.num_ahead", "one draft", 1),  # when it joins those that run ahead, after it was asked whether it shall
]


def parts_of(core: EngineCore, group: Group, part: str) -> list[object]:
    """All that a live request has of one part."""
    controllers = [each.controller for each in group.live if each.controller is not PLAIN]
    found: dict[str, list[object]] = {
        "group": [group],
        "ledger": [group.ledger],
        "search": [group.search],
        "compilation": [core._compiling.get(group)],
        "controller": list(controllers),
        "matcher": [controller.matcher for controller in controllers],
        "stops": [controller._stops for controller in controllers],
        "proposer": [controller.proposer for controller in controllers if controller.proposer is not NO_PROPOSER],
    }
    return [owner for owner in found[part] if owner is not None]


class Neighbours:
    """An engine with requests of every kind, whose answers are known."""

    def __init__(self, *, depth: int = 2, orders: bool = False, observes: bool = False) -> None:
        self.grammars, proposers = FuzzGrammars(), ToyProposers(orders, observes=observes)
        tools = DecodingTools(self.grammars, proposers, lambda: VOCABULARY)
        self.engine = Harness(num_blocks=160, max_num_seqs=24, depth=depth, tools=tools)
        prompt, length = [4, 5, 6], 12
        self.wanted = {
            "plain": continuation(prompt, length, seed=1),
            "drafts": continuation(prompt, length, seed=DRAFTED),
        }
        self.engine.submit("plain", prompt, seed=1, max_tokens=length)
        self.engine.submit("drafts", prompt, seed=DRAFTED, max_tokens=length)
        self.engine.submit("toy", prompt, seed=1, max_tokens=length, grammar="b")
        self.wanted["toy"] = grammar_answer(prompt, length, "b", seed=1)
        for number, grammar in enumerate(REAL_GRAMMARS):
            self.engine.submit(grammar, prompt, seed=number, max_tokens=length, grammar=grammar, end_ids=(3, 50))
            self.wanted[grammar] = real_answer(prompt, length, grammar, seed=number, index=0, end_ids=(3, 50))
        self.engine.submit("search", prompt, max_tokens=length, beam=BeamRules(2))
        self.wanted["search"] = list(beam_answers(BeamQuestion(tuple(prompt), BeamRules(2), length))[0].tokens)

    def run(self, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(500):
            if not self.engine.core.has_work:
                break
            each()
            self.grammars.time += 1
            self.engine.step()
            assert self.engine.core.dead is None

    def check(self) -> None:
        for name, tokens in self.wanted.items():
            assert self.engine.finished[name].error is None
            assert self.engine.answer(name) == tokens
        assert self.engine.core.stats().blocks.used == 0
        self.engine.core.close()


@pytest.mark.parametrize(("call", "kind", "after"), CASES)
def test_a_call_that_fails_for_one_request_ends_that_request_alone(call: str, kind: str, after: int) -> None:
    part, member = call.split(".")
    neighbours = Neighbours(orders=member in ("num_to_draft", "offer"), observes=kind == "one draft")
    engine, fault = neighbours.engine, Fault("fails", call, after)
    params = {"max_tokens": 30, "seed": 5, "end_ids": (3, 50), **KINDS[kind]}
    engine.submit("fails", [7, 8, 10], **params)  # type: ignore[arg-type]

    def spoil_all() -> None:
        group = engine.core.group("fails")
        for owner in parts_of(engine.core, group, part) if group is not None else []:
            if not type(owner).__name__.startswith("Spoiled") and hasattr(type(owner), member):
                spoil(owner, member, fault)

    neighbours.run(spoil_all)
    assert fault.num_strikes > 0
    message = engine.finished["fails"]
    assert message.error is not None
    assert len({sample.index for sample in message.samples}) == len(message.samples)
    neighbours.check()


@pytest.mark.parametrize(
    ("member", "grammar", "token"),
    [
        ("note_consumed", "start: /[a-h]{2,9}/", 0),
        ("undo_failure", "start: /[a-h]{2,9}/", 25),
        ("is_over", 'start: "ab" | "c"', 2),
        ("forced_token", "start: /[a-h]{2,9}/", 0),
        ("find_run", "start: /[a-c]/ /efghijk/ /[a-z]+/", 0),
    ],
)
def test_a_matcher_that_fails_in_a_batch_of_masks_fails_its_row_alone(member: str, grammar: str, token: int) -> None:
    matchers = [real_matcher(grammar, (3, 50)) for _ in range(6)]
    alone = real_matcher(grammar, (3, 50))
    fault = Fault("row 2", member)
    spoil(matchers[2], member, fault)
    table = MaskTable(num_rows=6, vocab_size=VOCAB)
    table.begin(range(6), matchers, [token if row == 2 else 0 for row in range(6)])
    filled = table.finish()
    table.close()
    assert fault.num_strikes > 0
    assert [row for row, _ in filled.failed] == [2]
    assert alone.advance(0)
    for row in (0, 1, 3, 4, 5):
        assert filled.bits[row].tolist() == alone.mask().tolist()


def test_a_row_that_fails_on_the_device_ends_its_request_alone() -> None:
    neighbours = Neighbours()
    engine = neighbours.engine
    engine.submit("fails", [7, 8, 9], seed=5, n=2, max_tokens=14)
    engine.step()
    (row, _) = [sequence.row for sequence in engine.core.group("fails").live]  # type: ignore[union-attr]
    engine.executor.rows[row].fails = True  # type: ignore[index]
    neighbours.run()
    assert engine.finished["fails"].error == "spoiled"
    neighbours.check()


@pytest.mark.parametrize("member", ["begin", "clone"])
def test_a_request_whose_proposer_cannot_be_made_is_refused_alone(member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbours = Neighbours()

    def fail(*arguments: object) -> None:
        raise RuntimeError("no proposer")

    owner = "ToyProposers" if member == "begin" else "ToyProposer"
    with monkeypatch.context() as patch, pytest.raises(InvalidRequest, match="no proposer"):
        patch.setattr(f"toy_decoding.{owner}.{member}", fail)
        neighbours.engine.submit("refused", [7, 8, 9], seed=DRAFTED, n=2, pin="prompt")
    assert neighbours.engine.core.pins.num_reserved == 0
    neighbours.run()
    neighbours.check()
    assert "refused" not in neighbours.engine.finished


def test_a_sample_is_named_once_if_its_request_fails_after_it_was_aborted() -> None:
    """One sample is aborted while the grammar is compiled; then the matcher cannot be cloned for the third."""
    grammars = ToyGrammars()
    engine = Harness(tools=DecodingTools(grammars, vocabulary=lambda: VOCABULARY))
    engine.submit("fails", [1, 2, 3], n=3, seed=1, grammar="aaa")
    engine.core.abort(Abort("fails", index=1))
    group = engine.core.group("fails")
    assert group is not None
    matcher = ToyMatcher("aaa", ())
    spoil(matcher, "clone", Fault("fails", "matcher.clone", after=1))
    engine.core._compiling[group].matcher = lambda rules: matcher  # type: ignore[method-assign]
    while engine.core.has_work:
        grammars.time += 1
        engine.step()
    assert engine.finished["fails"].error is not None
    assert [sample.index for sample in engine.finished["fails"].samples] == [0, 1]
    assert [sample.finish_reason for sample in engine.finished["fails"].samples] == ["error", "abort"]


@pytest.mark.parametrize("member", ["propose", "num_to_draft"])
def test_drafts_longer_than_asked_for_are_cut_to_what_there_is_room_for(member: str) -> None:
    proposers = ToyProposers(orders=member == "num_to_draft", may_run_ahead=False, longest=40, ignores_limit=True)
    engine = Harness(max_num_batched_tokens=8, tools=DecodingTools(proposers=proposers))
    for number in range(4):
        engine.submit(f"{number}", [number, 5, 6], seed=DRAFTED + number, max_tokens=5)
    engine.run()
    for number in range(4):
        assert engine.answer(f"{number}") == continuation([number, 5, 6], 5, seed=DRAFTED + number)
    plans = engine.executor.plans
    assert max(plan.num_tokens for plan in plans) <= 8
    assert max((request.num_tokens for plan in plans for request in plan.drafts), default=0) <= 4


def test_a_waiting_request_that_fails_gives_its_host_memory_back() -> None:
    engine = Harness(num_blocks=12, tiers=TierConfig(host_blocks=32), preemption="swap")
    for number in range(3):
        engine.submit(f"{number}", [number] * 6, n=2, seed=number, max_tokens=16)
    while not (swapped := [group for group in engine.core._scheduler.waiting if group.live[0].num_swapped]):
        engine.step()
    name = swapped[0].request.request_id
    engine.core._scheduler.paced.faults.append((swapped[0], RequestFault("it failed in the step that preempted it")))
    engine.run()
    assert engine.finished[name].error is not None
    assert all(engine.finished[f"{number}"].error is None for number in range(3) if f"{number}" != name)
    assert engine.core.stats().tiers.host_held == 0


def test_a_guided_sequence_is_not_asked_how_to_go_on_while_a_thread_makes_its_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its grammar forces what follows, so it stops running ahead; its last result comes with those of many others,
    whose masks are begun together."""
    neighbours = Neighbours(depth=3)
    guided = neighbours.engine.core._guided
    num_asked, forced = 0, GrammarMatcher.forced

    def ask(self: GrammarMatcher, limit: int) -> tuple[int, ...]:
        nonlocal num_asked
        batch = guided._table._batch if guided._table is not None else None
        assert batch is None or batch.done is None or self not in batch.matchers or batch.done.is_set()
        num_asked += 1
        return forced(self, limit)

    monkeypatch.setattr(GrammarMatcher, "forced", ask)
    for number in range(8):
        neighbours.engine.submit(f"{number}", [number], seed=number, max_tokens=14, grammar=REAL_GRAMMARS[4])
    neighbours.run()
    assert num_asked > 0
    assert all(message.error is None for message in neighbours.engine.finished.values())
    neighbours.check()
