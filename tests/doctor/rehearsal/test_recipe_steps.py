"""Planted recipes on two ranks that share a frame: each fault is named, the sound one gives nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullframe.doctor.judgement.judge import judge
from fullframe.doctor.probes.notes import End, Failure, Memory, Notes, Repeated, Update, read_notes
from fullframe.doctor.rehearsal.recipe_steps import SMALL, SMALL_STEPS, WHOLE, WHOLE_STEPS, rehearse
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from tests.doctor.rehearsal import recipes
from tests.rank_group import rank_group


def rehearsed(recipe: Callable[[], Recipe], strategy: Strategy, folder: Path, options: dict[str, Any]) -> str:
    from fullframe.ranks.mesh import forget_meshes

    try:
        rehearse(recipe(), strategy, folder, measure=lambda: {"process_bytes": 5.0}, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        forget_meshes()
    return ""


def notes_of(
    recipe: Callable[[], Recipe], folder: Path, strategy: Strategy | None = None, **options: Any
) -> dict[str, list[Notes]]:
    strategy = strategy or Strategy(width=2)
    problems = rank_group(2).run(rehearsed, recipe, strategy, folder, options)
    found = {name: read_notes(folder / name, 2) for name in (SMALL, WHOLE)}
    for name, ranks in found.items():
        ends = [
            Failure(kind="Error", text=problem, trace="") if problem else End(reason="enough") for problem in problems
        ]
        found[name] = [Notes(r.rank, [*r.events, end]) for r, end in zip(ranks, ends, strict=True)]
    return found


def test_a_sound_recipe_is_run_small_and_whole_and_gives_nothing(tmp_path: Path) -> None:
    notes = notes_of(recipes.sound, tmp_path)
    assert judge(notes[SMALL], at_full_size=False) == judge(notes[WHOLE], at_full_size=False) == []
    for name, steps in ((SMALL, SMALL_STEPS), (WHOLE, WHOLE_STEPS)):
        assert [len(rank.of(Update)) for rank in notes[name]] == [steps, steps]
        assert [rank.replica for rank in notes[name]] == [0, 0]
    (repeated,) = notes[SMALL][0].of(Repeated)
    assert repeated.first == repeated.second and repeated.first["loss"] > 0
    assert notes[WHOLE][0].one(Memory) == Memory(measured={"process_bytes": 5.0})


@pytest.mark.parametrize(
    ("recipe", "code"), recipes.FAULTS.items(), ids=lambda value: getattr(value, "__name__", value)
)
def test_a_planted_recipe_is_named_by_its_small_form(recipe: Callable[[], Recipe], code: str, tmp_path: Path) -> None:
    notes = notes_of(recipe, tmp_path, whole=False)
    assert [finding.code for finding in judge(notes[SMALL], at_full_size=False)] == [code]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "code"), recipes.FAULTS.items(), ids=lambda value: getattr(value, "__name__", value)
)
def test_on_stages_it_is_named_too(recipe: Callable[[], Recipe], code: str, tmp_path: Path) -> None:
    notes = notes_of(recipe, tmp_path, Strategy(stages=2), whole=False)
    assert [finding.code for finding in judge(notes[SMALL], at_full_size=False)] == [code]


def test_an_error_in_the_small_form_spares_the_whole_one(tmp_path: Path) -> None:
    notes = notes_of(recipes.not_finite, tmp_path)
    assert notes[SMALL][0].of(Update) == [] and not (tmp_path / WHOLE).exists()


def test_data_that_reads_differently_each_time(tmp_path: Path) -> None:
    notes = notes_of(recipes.forgetful_data, tmp_path, Strategy(data=2), whole=False)
    assert [finding.code for finding in judge(notes[SMALL], at_full_size=False)] == ["FF326"]


def test_a_loss_scale_that_never_fits(tmp_path: Path) -> None:
    notes = notes_of(recipes.overflowing, tmp_path, Strategy(width=2, precision="fp16"), whole=False)
    assert [finding.code for finding in judge(notes[SMALL], at_full_size=False)] == ["FF322"]


def test_recompute_counts_no_batch_twice(tmp_path: Path) -> None:
    notes = notes_of(recipes.sound, tmp_path, Strategy(width=2, recompute="blocks"), whole=False)
    assert judge(notes[SMALL], at_full_size=False) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(data=2),
        Strategy(data=2, shard_parameters=True),
        Strategy(data=2, shard_optimizer=True),
        Strategy(width=2, update_in_backward=True),
        Strategy(width=2, microbatches=2, precision="bf16"),
        Strategy(stages=2, microbatches=2),
    ],
    ids=lambda strategy: "-".join(k for k, v in vars(strategy).items() if v not in (1, "none", False, None, ())),
)
def test_with_every_technique_a_sound_recipe_gives_nothing(strategy: Strategy, tmp_path: Path) -> None:
    notes = notes_of(recipes.sound, tmp_path, strategy, whole=False)
    assert judge(notes[SMALL], at_full_size=False) == []
    assert len(notes[SMALL][0].of(Update)) >= SMALL_STEPS
    assert notes[SMALL][0].of(Update)[0].gradients
