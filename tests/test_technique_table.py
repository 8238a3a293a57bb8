"""One row a technique: what a toy row alone brings about is the worked example of add_a_technique.md."""

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tyro

from fullframe import strategy as table
from fullframe.cli.words import changed, technique_options, words
from fullframe.errors import StrategyError
from fullframe.planning import candidates as planner
from fullframe.planning.candidates import candidates, saves_more, with_value
from fullframe.planning.estimate import Estimator
from fullframe.planning.search import complexity
from fullframe.strategy import TECHNIQUES, Strategy, describe
from fullframe.technique import Technique
from tests.planning.test_candidates import GIB, job, prediction

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "how_it_works" / "add_a_technique.md").read_text()
NAMES = {technique.name for technique in TECHNIQUES}


def test_every_field_but_the_mesh_has_one_row() -> None:
    fields = {field.name for field in dataclasses.fields(Strategy)} - {"data", "depth", "height", "width"}
    assert fields == NAMES and len(NAMES) == len(TECHNIQUES)
    assert all(technique.help.endswith(".") for technique in TECHNIQUES)


def test_the_planner_tries_every_technique_or_the_row_says_why_not() -> None:
    asked = replace(job(), optimizers=("recipe", "sgd"), recompute_modules=("stem",), ranks=4, parts=8, iterations=8)
    asked = replace(asked, can_compile=True)
    found = list(candidates(asked))
    found += [with_value(found[0], t, value) or found[0] for t in TECHNIQUES for value in t.last(asked, found[0])]
    found += [refined[1] for s in found for t in TECHNIQUES if (refined := t.refined(s, GIB)) is not None]
    for technique in TECHNIQUES:
        tried = any(technique.used(strategy) for strategy in found) or bool(technique.advised(asked))
        assert tried is not bool(technique.never), technique.name


def test_the_planner_and_the_command_line_name_no_technique() -> None:
    """But `microbatches` and `precision`, by which work is scaled, and what `plan` is asked for (which optimizers)."""
    known = {"microbatches", "precision", "recompute_modules", "optimizer"}
    for path in [p for folder in ("planning", "cli") for p in (ROOT / "src" / "fullframe" / folder).glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.arg if isinstance(node, ast.keyword) else ""
            assert name not in NAMES - known, f"{path}: {name}"


def blocks_of(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Strategy]]:
    """Strategies with the field of the guide, and the table with its row."""
    field, row = blocks_of(GUIDE)[:2]
    scope = {**vars(table), "dataclass": dataclass, "Strategy": Strategy}
    body = "\n".join(f"    {line}" for line in field.splitlines())
    exec(f"@dataclass(frozen=True, kw_only=True)\nclass Toy(Strategy):\n{body}\n", scope)
    made = eval(row.strip().removesuffix(","), scope)
    assert isinstance(made, Technique)
    for name, module in sys.modules.items():
        if name.startswith("fullframe") and "TECHNIQUES" in vars(module):
            monkeypatch.setattr(module, "TECHNIQUES", (*TECHNIQUES, made))
    monkeypatch.setattr(planner, "Strategy", scope["Toy"])
    return scope["Toy"]


def test_options_follow_from_the_row(toy: type[Strategy]) -> None:
    options = technique_options(toy)
    given = tyro.cli(options, args=["--half-activations", "--offload"], config=(tyro.conf.FlagCreatePairsOff,))
    assert changed(given) == {"offload": True, "half_activations": True}
    assert words(given) == ["--offload", "--half-activations"]


def test_what_is_said_and_refused_follows_from_the_row(toy: type[Strategy]) -> None:
    assert describe(toy(width=2, half_activations=True)) == "width 2, fp32, half activations"
    assert complexity(toy(half_activations=True)) == 1
    with pytest.raises(StrategyError, match="half_activations has nothing left to halve, precision 'bf16' does it"):
        toy(half_activations=True, precision="bf16")
    with pytest.raises(StrategyError, match="half_activations must be one of False, True, got 3"):
        toy(half_activations=3)


def test_what_the_planner_does_follows_from_the_row(toy: type[Strategy]) -> None:
    found = list(candidates(job()))
    halved = [strategy for strategy in found if strategy.half_activations]
    assert halved and {strategy.precision for strategy in halved} == {"tf32", "fp32"}
    assert saves_more(toy(half_activations=True), toy()) and not saves_more(toy(), toy(half_activations=True))
    known = {toy(): prediction(activation=8 * GIB, seconds=1.0)}
    expected = Estimator(known, job())(toy(half_activations=True))
    assert expected.bytes == 4 * GIB and expected.seconds == pytest.approx(1.1)


def test_the_guide_names_files_that_are_there() -> None:
    for path in re.findall(r"`((?:src|tests|docs)/[\w/.]+\.(?:py|md))`", GUIDE):
        assert (ROOT / path).exists(), path
