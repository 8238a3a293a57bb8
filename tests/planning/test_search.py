"""The search against looking at everything, on a cost that is worked out by hand; reasons; advice."""

import dataclasses
from collections.abc import Sequence

import pytest

from fullframe.errors import RecipeError, ShapeError, StrategyError, UnsupportedOp
from fullframe.planning import search as searching
from fullframe.planning.candidates import Job, border, candidates, mesh_of
from fullframe.planning.pool import Outcome, Refusal
from fullframe.planning.ranking import Plan, Why, plans_of, winner
from fullframe.planning.search import Search, complexity, weight
from fullframe.planning.shortfall import sentences, shortfall
from fullframe.simulation.prediction import Prediction
from fullframe.simulation.simulate import ReadsNumbers
from fullframe.strategy import Strategy, describe
from tests.planning.test_candidates import GIB, job, prediction


def cost(strategy: Strategy, job: Job) -> Prediction:
    """A model of 4 GiB of weights with AdamW, 40 GiB of activations a frame, of which recompute leaves a fifth.

    Every cut costs some time and some activations, every message something.
    """
    share = job.of(strategy)
    cuts = border(mesh_of(strategy), job.frame) / job.rows
    kept = 1.0 if strategy.recompute == "none" else 0.2
    if strategy.recompute == "budget":
        kept = 0.5
    kept *= 0.4 if strategy.offload else 1.0
    sharded = strategy.ranks if strategy.shard_parameters else 1
    state = sharded * (strategy.ranks if strategy.shard_optimizer else 1)
    digits = 1.0 if strategy.precision in ("bf16", "fp16") else 1.7
    bytes = {
        "parameter": 4 * GIB // sharded,
        "gradient": 4 * GIB // sharded,
        "optimizer": 8 * GIB // state,
        "activation": int(40 * GIB * share.held * kept * digits * (1 + 0.03 * cuts)),
    }
    seconds = {
        "matmul": share.work * digits * (1.3 if strategy.recompute == "blocks" else 1.15 if kept == 0.5 else 1.0),
        "exchange": 0.02 * cuts * strategy.microbatches,
        "launch": 0.01 * strategy.microbatches,
        "gradients": 0.03 * (strategy.ranks > 1) * (3 if strategy.shard_parameters else 1),
        "offload": 0.2 * share.work * strategy.offload,
    }
    made = prediction(**bytes, context=GIB // 2)
    limits = {"arithmetic": seconds["matmul"]}
    return dataclasses.replace(made, seconds=seconds, limits=limits, step_seconds=sum(seconds.values()))


def searched(job: Job, limit: int, cost_of: object = cost) -> tuple[Search, list[Plan]]:
    search = Search(job=job, limit_bytes=limit)
    search.run(lambda strategies: [cost_of(s, job) for s in strategies], width=2, seconds=60)  # type: ignore[operator]
    return search, plans_of(search)


@pytest.mark.parametrize("gib", [14, 18, 24, 30, 40, 60, 120])
@pytest.mark.parametrize(
    ("cluster", "batch"), [("4xV100-16GB", 1), ("8xA100-80GB", 8), ("8xA100-80GB", 6), ("1xT4", 2)]
)
def test_the_search_finds_what_looking_at_everything_finds(cluster: str, batch: int, gib: int) -> None:
    asked = job(cluster, batch)
    search, plans = searched(asked, gib * GIB)
    everything = {s: p for s in candidates(asked) if (p := cost(s, asked)).device_bytes <= gib * GIB}
    best = min(everything, key=lambda s: everything[s].step_seconds * weight(s), default=None)
    found = winner(plans)
    if best is None:
        assert found is None and search.known
    else:
        assert found is not None and found.prediction is not None
        assert found.prediction.step_seconds <= everything[best].step_seconds * 1.02
    assert len(search.known) <= 60, len(search.known)


def small_frames(strategy: Strategy, job: Job) -> Prediction:
    """Milliseconds: of split tensors the host has six times the work, and the device half of its work besides."""
    found, again, is_split = cost(strategy, job), strategy.microbatches, strategy.parts > 1
    more = 4 / 3 if strategy.recompute == "blocks" else 1.0
    device = more * (6e-3 * job.of(strategy).work + 2.5e-3 * is_split * again)
    host = more * again * (10.5e-3 if is_split else 1.7e-3)
    seconds, limits = {"memory": device, "launch": max(host - device, 0.0)}, {"bytes": device}
    step_seconds = sum(seconds.values())
    return dataclasses.replace(found, seconds=seconds, limits=limits, step_seconds=step_seconds, host_seconds=host)


@pytest.mark.parametrize(("batch", "gib"), [(1, 24), (1, 120), (2, 60)])
def test_more_ranks_are_not_taken_for_being_there(batch: int, gib: int) -> None:
    steps = []
    for ranks in (1, 2, 8):
        found = winner(searched(job(f"{ranks}xA100-80GB", batch), gib * GIB, small_frames)[1])
        steps.append(found.prediction.step_seconds if found is not None and found.prediction is not None else 1.0)
    assert steps == sorted(steps, reverse=True), steps


def short_kernels(strategy: Strategy, job: Job) -> Prediction:
    """Milliseconds: the host binds, most kernels are the shortest there are; 16 bits take casts, replicas messages."""
    found, again = cost(strategy, job), strategy.microbatches
    casts = 1.8 if strategy.precision in ("bf16", "fp16") else 1.0
    more = casts * (4 / 3 if strategy.recompute == "blocks" else 1.0) * again
    more *= 8 if strategy.parts > 1 or strategy.stages > 1 else 1.25 if strategy.ranks > 1 else 1.0
    arithmetic = 0.05e-3 * job.of(strategy).work * (1 if casts > 1 else 8)
    kernels, host = {"matmul": arithmetic + 0.9e-3 * more, "memory": 0.1e-3 * more}, 2.8e-3 * more
    device = sum(kernels.values())
    limits = {"arithmetic": arithmetic, "kernel": device - arithmetic}
    seconds = {**kernels, "offload": 1e-3 * strategy.offload, "launch": max(host - device, 0.0)}
    step_seconds = sum(seconds.values())
    return dataclasses.replace(found, seconds=seconds, limits=limits, step_seconds=step_seconds, host_seconds=host)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_where_the_host_binds_fewer_kernels_are_found_to_be_faster(ranks: int) -> None:
    asked = job(f"{ranks}xV100-16GB", 4)
    search, plans = searched(asked, 400 * GIB, short_kernels)
    assert describe(plans[0].strategy) == "one rank, fp32" and len(search.known) <= 10, [*map(describe, search.known)]


def test_one_rank_needs_no_buffers_for_messages() -> None:
    def small(strategy: Strategy, job: Job) -> Prediction:
        found = prediction(activation=GIB // 2)
        return dataclasses.replace(found, terms={"nccl": 4 * GIB * (strategy.ranks > 1)})

    found = winner(searched(job("2xA100-80GB", 2), GIB, small)[1])
    assert found is not None and found.strategy.ranks == 1


def test_every_candidate_has_a_reason() -> None:
    asked = job("4xA100-80GB", 4)
    _, plans = searched(asked, 30 * GIB)
    assert {plan.strategy for plan in plans} >= set(candidates(asked))
    assert len({plan.strategy for plan in plans}) == len(plans) and all(plan.reason for plan in plans)
    fits = [plan.fits for plan in plans]
    assert fits == sorted(fits, reverse=True)
    fitting = [(plan.prediction.step_seconds, plan) for plan in plans if plan.fits and plan.prediction is not None]
    _, fastest = min(fitting, key=lambda pair: pair[0])
    assert fastest.reason.startswith("the fastest of")
    assert all(("times the fastest's step" in plan.reason) is (plan is not fastest) for _, plan in fitting)
    simulated = [plan for plan in plans if plan.prediction is not None]
    assert simulated == plans[: len(simulated)]
    for plan in simulated:
        assert plan.headroom_bytes is not None and (plan.headroom_bytes >= 0) is plan.fits
        assert plan.fits or "more than there is" in plan.reason
    for plan in plans[len(simulated) :]:
        assert (plan.why is Why.SLOWER) is ("times the fastest's step" in plan.reason)
        assert (plan.why is Why.NEEDLESS) is plan.reason.startswith("saves memory that there is enough of")
    rest = " ".join(plan.reason for plan in plans[len(simulated) :])
    assert "times the fastest's step, scaled from" in rest or "GiB, scaled from" in rest


def test_state_that_does_not_fit_alone_is_said_so() -> None:
    _, plans = searched(job("1xT4", 1), 10 * GIB)
    assert winner(plans) is None
    reasons = [plan.reason for plan in plans if plan.prediction is None]
    assert reasons and all(r.startswith("parameters, gradients and optimizer state alone need 16.0") for r in reasons)


def in_rounds(asked: Job, limit: int, rounds: int, width: int, monkeypatch: pytest.MonkeyPatch) -> Search:
    """A search that has time for so many rounds of simulations."""
    clock = [0.0]
    monkeypatch.setattr(searching.time, "monotonic", lambda: clock[0])

    def runner(strategies: Sequence[Strategy]) -> list[Outcome]:
        clock[0] += 1
        return [cost(strategy, asked) if clock[0] <= rounds else None for strategy in strategies]

    search = Search(job=asked, limit_bytes=limit)
    search.run(runner, width=width, seconds=rounds + 0.5)
    return search


def test_what_was_not_tried_is_not_said_not_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, limit = job("4xA100-80GB", 8), 30 * GIB
    best = winner(searched(asked, limit)[1])
    assert best is not None
    for rounds in (0, 1):
        search = in_rounds(asked, limit, rounds, 2, monkeypatch)
        plans = plans_of(search)
        assert winner(plans) is None and len(search.known) == 2 * rounds
        assert best.strategy in search.untried
        assert next(p for p in plans if p.strategy == best.strategy).reason == "not tried: the time was over"
        assert {plan.strategy for plan in plans} >= set(candidates(asked))
        assert not any("nothing fits" in plan.reason for plan in plans)
    assert not searched(asked, limit)[0].untried


@pytest.mark.parametrize("width", [1, 2])
def test_what_needs_least_is_tried_early(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 1 + 2 // width  # the two that are far apart, and it
    search = in_rounds(job("4xA100-80GB", 8), 13 * GIB, rounds, width, monkeypatch)
    assert search.fitting and search.untried


def test_that_nothing_fits_is_said_of_what_was_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    search = in_rounds(job("4xA100-80GB", 8), 13 * GIB, 1, 2, monkeypatch)
    found = shortfall(None, search, None)  # type: ignore[arg-type]  # nothing is simulated for advice
    assert found is not None and not found.advice
    assert sentences(found)[0].startswith("nothing that was simulated fits: ")


def test_where_nothing_is_expected_to_fit_what_needs_least_is_tried_all_the_same() -> None:
    asked = job("1xT4", 2)
    search, _ = searched(asked, GIB)
    need = {strategy: cost(strategy, asked).device_bytes for strategy in candidates(asked)}
    tried = [need[strategy] for strategy in search.known if strategy in need]
    assert not search.fitting and min(tried) == min(need.values()) and len(tried) < len(need) / 2


def test_a_budget_hands_out_what_recompute_leaves_free() -> None:
    # One frame on one rank: 57 GiB as it is, 25 with every block recomputed, 37 with a budget.
    _, plans = searched(job("1xA100-80GB", 1), 40 * GIB)
    found = plans[0]
    assert found.fits and found.strategy.recompute == "budget"
    blocks = next(p for p in plans if p.strategy.recompute == "blocks" and not p.strategy.offload)
    assert blocks.prediction is not None and blocks.headroom_bytes is not None
    budget = int(blocks.prediction.bytes["activation"] + 0.9 * blocks.headroom_bytes)
    assert found.strategy.recompute_budget_bytes == budget


def test_of_equals_the_simpler_one_wins() -> None:
    def equal(strategy: Strategy, job: Job) -> Prediction:
        return dataclasses.replace(cost(strategy, job), step_seconds=1.0, limits={"arithmetic": 1.0})

    _, plans = searched(job("4xA100-80GB", 4), 300 * GIB, equal)
    assert complexity(plans[0].strategy) == 0 and plans[0].strategy.precision == "bf16"


def test_a_simpler_one_is_not_said_to_be_the_fastest() -> None:
    def sharded_is_faster(strategy: Strategy, job: Job) -> Prediction:
        seconds = 0.98 if strategy.shard_optimizer else 1.0
        return dataclasses.replace(cost(strategy, job), step_seconds=seconds, limits={"arithmetic": seconds})

    asked = job("4xA100-80GB", 4)
    search = Search(job=asked, limit_bytes=300 * GIB)
    search.known |= {s: sharded_is_faster(s, asked) for s in (Strategy(data=4), Strategy(data=4, shard_optimizer=True))}
    plain, sharded = plans_of(search)
    assert plain.strategy == Strategy(data=4) and plain.reason == "1.02 times the fastest's step, and simpler"
    assert sharded.reason == "the fastest of 2 that fit, of 2 simulated"


NO_RULE = Refusal(UnsupportedOp, "conv9d")


def test_a_refusal_holds_for_all_of_its_kind() -> None:
    asked = job("4xA100-80GB", 4)
    calls: list[Strategy] = []

    def runner(strategies: Sequence[Strategy]) -> list[Outcome]:
        calls.extend(strategies)
        return [NO_RULE if s.width > 1 or s.height > 1 else cost(s, asked) for s in strategies]

    search = Search(job=asked, limit_bytes=100 * GIB)
    search.run(runner, width=2, seconds=60)
    split = {s for s in candidates(asked) if s.height * s.width > 1}
    assert split == set(search.refused) and len([s for s in calls if s in split]) <= 6
    plans = plans_of(search)
    assert plans[0].strategy.data == 4
    assert plans[-1].reason == "conv9d" and plans[-1].prediction is None and not plans[-1].fits


def test_a_step_that_needs_two_samples_is_found_where_it_has_them() -> None:
    asked = job("4xA100-80GB", 4)

    def needs_two(strategy: Strategy, job: Job) -> Outcome:
        if job.batch_size // strategy.data // strategy.microbatches < 2:
            return Refusal(RecipeError, "Expected more than 1 value per channel when training")
        return cost(strategy, job)

    search, plans = searched(asked, 100 * GIB, needs_two)
    everything = {s: p for s in candidates(asked) if isinstance(p := needs_two(s, asked), Prediction)}
    fitting = {s: p for s, p in everything.items() if p.device_bytes <= 100 * GIB}
    best = min(fitting.values(), key=lambda p: p.step_seconds)
    found = winner(plans)
    assert found is not None and found.prediction is not None
    assert found.prediction.step_seconds <= 1.1 * best.step_seconds
    assert not set(search.refused) & set(everything)


def test_a_frame_that_is_cut_too_fine_refuses_no_coarser_cut() -> None:
    asked = job("8xA100-80GB", 1)

    def too_fine(strategy: Strategy, job: Job) -> Outcome:
        return Refusal(ShapeError, "leaves rank 3 empty") if strategy.width > 2 else cost(strategy, job)

    search, plans = searched(asked, 100 * GIB, too_fine)
    assert mesh_of(plans[0].strategy) == (1, 1, 4, 2)
    assert set(search.refused) <= {s for s in candidates(asked) if s.width > 2}


def test_when_everything_is_refused_there_is_no_winner() -> None:
    search = Search(job=job("2xT4", 1), limit_bytes=GIB)
    search.run(lambda strategies: [Refusal(RecipeError, "no model")] * len(strategies), width=2, seconds=60)
    plans = plans_of(search)
    assert winner(plans) is None and {plan.reason for plan in plans} == {"no model"}


def test_what_the_plain_step_raises_is_not_tried_with_every_technique() -> None:
    asked = job("4xA100-80GB", 4)
    calls: list[Strategy] = []

    def runner(strategies: Sequence[Strategy]) -> list[Outcome]:
        calls.extend(strategies)
        return [Refusal(RecipeError, "shapes do not match") for _ in strategies]

    search = Search(job=asked, limit_bytes=100 * GIB)
    search.run(runner, width=1, seconds=60)
    assert set(search.refused) == set(candidates(asked)) and len(calls) <= 40, len(calls)


def test_a_technique_that_is_refused_refuses_nothing_without_it() -> None:
    asked = job("4xA100-80GB", 4)

    def refuses_offload(strategy: Strategy, job: Job) -> Outcome:
        return Refusal(StrategyError, "no road") if strategy.offload else cost(strategy, job)

    search, plans = searched(asked, 30 * GIB, refuses_offload)
    assert plans[0].fits and search.refused and all(strategy.offload for strategy in search.refused)


def test_numbers_read_in_the_first_simulation_are_all_there_is_to_know() -> None:
    asked = job("4xA100-80GB", 4)
    calls: list[Strategy] = []

    def runner(strategies: Sequence[Strategy]) -> list[Outcome]:
        calls.extend(strategies)
        return [Refusal(ReadsNumbers, "at line 7")] * len(strategies)

    search = Search(job=asked, limit_bytes=100 * GIB)
    search.run(runner, width=1, seconds=60)
    assert set(search.refused) == set(candidates(asked)) and len(calls) == 1


@pytest.mark.parametrize("always", [True, False])
def test_a_step_that_reads_numbers_is_not_tried_again(always: bool) -> None:
    asked = job("4xA100-80GB", 4)
    reads = {s for s in candidates(asked) if always or s.height * s.width > 1}
    calls: list[Strategy] = []

    def runner(strategies: Sequence[Strategy]) -> list[Outcome]:
        calls.extend(strategies)
        return [Refusal(ReadsNumbers, "at line 7") if s in reads else cost(s, asked) for s in strategies]

    search = Search(job=asked, limit_bytes=100 * GIB)
    search.run(runner, width=2, seconds=60)
    assert set(search.refused) == reads and len(reads.intersection(calls)) <= (2 if always else 6)
    assert always or plans_of(search)[0].strategy.data == 4


def test_a_strategy_in_words() -> None:
    assert describe(Strategy()) == "one rank, fp32"
    assert describe(Strategy(data=2, width=4, precision="fp16", microbatches=3, recompute="blocks", offload=True)) == (
        "data 2 x width 4, fp16, 3 microbatches, recompute blocks, offload"
    )
    assert describe(Strategy(recompute="budget", recompute_budget_bytes=3 * GIB, shard_parameters=True, data=2)) == (
        "data 2, fp32, recompute to 3.0 GiB, shard parameters"
    )


def test_what_takes_long_is_tried_at_the_end_with_the_fastest_alone() -> None:
    def faster(strategy: Strategy, job: Job) -> Prediction:
        made = cost(strategy, job)
        return dataclasses.replace(made, step_seconds=made.step_seconds * (0.8 if strategy.compile else 1.0))

    asked = job("8xA100-80GB", 8)
    plain, _ = searched(asked, 60 * GIB, faster)
    assert not any(strategy.compile for strategy in plain.known)
    search, plans = searched(dataclasses.replace(asked, can_compile=True), 60 * GIB, faster)
    compiled = [strategy for strategy in search.known if strategy.compile]
    assert len(compiled) == 2 and len(search.known) == len(plain.known) + 2
    best = winner(plans)
    assert best is not None and best.strategy in compiled and describe(best.strategy).endswith(", compile")
    plainer = plans_of(plain)[0].strategy
    assert best.strategy == dataclasses.replace(plainer, compile=True)
