"""Calls that are wrong: each is refused in words, whatever is wrong with it, and no right one is."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fullframe as ff
from fullframe.arguments import checked, checked_but, fits
from fullframe.errors import ArgumentError

COLUMNS = torch.zeros(1, 1, 4, 4)


class Looks(Protocol):
    def look(self) -> None: ...


@pytest.mark.parametrize(
    ("value", "kind", "does"),
    [
        (3, int, True),
        (np.int64(3), int, True),
        (3.0, int, False),
        ("3", int, False),
        (3, float, True),
        (np.float32(3), float, True),
        (None, int | None, True),
        ("a", Path | str, True),
        (Path("a"), str | Path, True),
        (1, bool, False),
        ("none", Literal["none", "all"], True),
        ("some", Literal["none", "all"], False),
        (True, Literal[1], False),
        ("abc", Sequence[str], False),  # its letters
        (("abc",), Sequence[str], True),
        ("abc", str | Collection[str], True),
        ({}, Mapping[str, int], True),
        ([], Mapping[str, int], False),
        (print, Callable[[], None], True),
        (3, Callable[[], None], False),
        (3, Any, True),
        (3, Looks, True),  # what has no class is not known
    ],
)
def test_what_fits_an_annotation(value: object, kind: Any, does: bool) -> None:
    assert fits(value, kind) is does


@checked
def scaled(image: torch.Tensor, factor: float = 2.0, *names: str, mode: Literal["up", "down"] = "up") -> torch.Tensor:
    """The image, larger.

    And more.
    """
    return image * factor


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "ff.scaled: missing a required argument: 'image'; it is ff.scaled(image, factor=2.0, *names, "),
        ((), {}, "mode='up'): The image, larger."),
        ((COLUMNS,), {"modus": 1}, "got an unexpected keyword argument 'modus'; it is ff.scaled(image,"),
        ((), {"imag": COLUMNS}, "ff.scaled: got an unexpected keyword argument 'imag'; it is ff.scaled(image,"),
        ((2.0, COLUMNS), {}, "image must be a Tensor, got 2.0; image and factor are exchanged"),
        ((COLUMNS, "2"), {}, "ff.scaled: factor must be a float, got '2'"),
        ((COLUMNS, 2, "a", 3), {}, "names must be a str, got 3"),
        ((COLUMNS,), {"mode": "left"}, "mode must be 'up' or 'down', got 'left'"),
        ((torch.Tensor,), {}, "image must be a Tensor, got the class Tensor; make one: Tensor(...)"),
        ((scaled,), {}, "image must be a Tensor, got the function scaled; give what it returns: scaled()"),
        ((np.zeros((3, 4)),), {}, "got an ndarray of shape (3, 4); torch.as_tensor makes one"),
    ],
)  # fmt: skip
def test_what_is_said(args: Sequence[Any], kwargs: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError) as error:
        scaled(*args, **kwargs)
    assert words in str(error.value)


def test_what_is_right_passes_and_is_named_as_before() -> None:
    assert scaled(COLUMNS, 3, "a", mode="down").shape == COLUMNS.shape
    assert scaled.__name__ == "scaled" and (scaled.__doc__ or "").startswith("The image")


def test_some_arguments_are_left_to_the_function() -> None:
    @checked_but("part")
    def share(part: torch.Tensor, count: int) -> object:
        return part

    assert share("what the other ranks must hear of", 1) == "what the other ranks must hear of"  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="count must be an int"):
        share(COLUMNS, "1")  # type: ignore[arg-type]


def wrong_calls() -> dict[str, Callable[[], object]]:
    """Of every public name slips of all kinds; mypy, which would see each of them, is told not to look."""
    f: Any = ff
    mesh, model = ff.init_mesh(), nn.Conv2d(1, 1, 1)
    recipe = f.Recipe(
        model=lambda: model,
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: [COLUMNS[0]],
        batch_size=1,
    )
    strategy, optimizer = f.Strategy(), torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "init_mesh: ff.init_mesh(data=2)": lambda: f.init_mesh(data=2),
        "init_mesh: a tuple": lambda: f.init_mesh((1, 2)),
        "parallelize: no mesh": lambda: f.parallelize(model),
        "parallelize: exchanged": lambda: f.parallelize(mesh, model),
        "parallelize: a class": lambda: f.parallelize(nn.Conv2d, mesh),
        "parallelize: options that contradict": lambda: f.parallelize(
            model, mesh, shard_parameters=True, average_gradients=False
        ),
        "ShardedLoader: a dataset": lambda: f.ShardedLoader([COLUMNS], mesh),
        "ShardedLoader: a loader of loaders": lambda: f.ShardedLoader(
            f.ShardedLoader(DataLoader(COLUMNS, 1), mesh), mesh
        ),
        "ShardedLoader: one name": lambda: f.ShardedLoader(DataLoader(COLUMNS, 1), mesh, split="image"),
        "ShardedStream: a mesh alone": lambda: f.ShardedStream(mesh),
        "ShardedStream: a number": lambda: f.ShardedStream(4, mesh),
        "ShardedStream: a loader of numbered samples": lambda: f.ShardedStream(DataLoader(COLUMNS, 1), mesh),
        "shard: numpy": lambda: f.shard(COLUMNS.numpy(), mesh),
        "shard: exchanged": lambda: f.shard(mesh, COLUMNS),
        "full: numpy": lambda: f.full(COLUMNS.numpy()),
        "scatter: exchanged": lambda: f.scatter(mesh, COLUMNS),
        "from_local: exchanged": lambda: f.from_local(mesh, COLUMNS),
        "from_local: like": lambda: f.from_local(COLUMNS, mesh, like="x"),
        "from_local: placements": lambda: f.from_local(COLUMNS, mesh, placements={"width": "3"}),
        "SpatialTensor: by its class": lambda: f.SpatialTensor(COLUMNS),
        "TrainStep: no strategy": lambda: f.TrainStep(model, lambda model, batch: None, optimizer),
        "TrainStep: exchanged": lambda: f.TrainStep(model, optimizer, lambda model, batch: None, strategy),
        "TrainStep: an optimizer's class": lambda: f.TrainStep(model, lambda m, b: None, torch.optim.SGD, strategy),
        "fit: the function": lambda: f.fit(lambda: recipe, strategy, "nowhere"),
        "fit: exchanged": lambda: f.fit(strategy, recipe, "nowhere"),
        "fit: no directory": lambda: f.fit(recipe, strategy),
        "fit: resume": lambda: f.fit(recipe, strategy, "nowhere", resume="yes"),
        "fit: steps": lambda: f.fit(recipe, strategy, "nowhere", steps=-1),
        "fit: hang_timeout": lambda: f.fit(recipe, strategy, "nowhere", hang_timeout=-1),
        "fit: no end": lambda: f.fit(recipe, strategy, "nowhere", hang_timeout=float("inf")),
        "simulate: a mesh": lambda: f.simulate(mesh, recipe),
        "simulate: names": lambda: f.simulate(recipe, strategy, without="context"),
        "plan: a path": lambda: f.plan("recipe.py", "2xcpu"),
        "plan: a number": lambda: f.plan(recipe, 2),
        "plan: one precision": lambda: f.plan(recipe, "2xT4", precisions="fp16"),
        "plan: no such precision": lambda: f.plan(recipe, "2xT4", precisions=["fp8"]),
        "plan: no memory": lambda: f.plan(recipe, "2xT4", memory_limit_bytes=-1),
        "report: a recipe": lambda: f.report(recipe),
        "unroll: a function": lambda: f.unroll(lambda state: state, 2),
        "fixed_point: a class": lambda: f.fixed_point(nn.Conv2d),
        "fixed_point: by place": lambda: f.fixed_point(model, 1e-3),
        "watch_leaks: by place": lambda: f.watch_leaks(model),
        "rule: without functions": lambda: f.rule(),
        "rule: a number": lambda: f.rule(3),
        "rule: no library": lambda: f.rule("relu"),
        "rule: twice": lambda: f.rule(torch.relu)(lambda func, x: x),
        "Strategy: no such field": lambda: f.Strategy(widht=2),
        "Strategy: by place": lambda: f.Strategy(2),
        "Strategy: words": lambda: f.Strategy(recompute="blocks", recompute_modules="layer"),
        "Strategy: a word for a number": lambda: f.Strategy(clip_norm="a"),
        "Strategy: no text": lambda: f.Strategy.from_json(None),
        "Recipe: nothing": lambda: f.Recipe(),
        "Recipe: by place": lambda: f.Recipe(model, 1),
        "ShardedLoader: an empty state": lambda: f.ShardedLoader(DataLoader(COLUMNS, 1), mesh).load_state_dict({}),
    }


CALLS = list(wrong_calls())


def test_every_public_name_is_called_wrongly() -> None:
    assert {case.partition(":")[0] for case in CALLS} | {"FullframeError", "UnsupportedOp"} == set(ff.__all__)


@pytest.mark.parametrize("case", CALLS)
def test_wrong_calls_end_in_words(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ff.FullframeError):
        wrong_calls()[case]()  # anew: other tests end the process group of its mesh
    assert not list(tmp_path.iterdir()), "before anything is written"


RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": lambda: None}, r"recipe.model\(\) must return an nn.Module, got None"),
    "a model's class": ({"model": lambda: nn.Conv2d}, "got the class Conv2d"),
    "no optimizer": ({"optimizer": lambda parameters: None}, "must return an Optimizer, got None"),
    "an optimizer's class": ({"optimizer": lambda parameters: torch.optim.SGD}, "got the class SGD"),
    "no data": ({"data": lambda: None}, "a dataset with __len__ and __getitem__.* is needed, got None"),
    "an iterator": ({"data": lambda: iter([])}, "is needed, got a list_iterator"),
    "a loss for each pixel": ({"loss": lambda model, batch: model(batch)}, "got shape .*; take its .mean"),
    "a complex loss": ({"loss": lambda model, batch: model(batch).mean() * 1j}, "a complex number"),
    "a word for a count": (
        {"loss": lambda model, batch: (model(batch).sum(), "4")},
        "count must be one number, got str",
    ),
    "no learning rate": ({"schedule": lambda step: None}, "a finite number, got None"),
    "a NaN": ({"schedule": lambda step: float("nan")}, "a finite number, got nan"),
    "no measures": ({"evaluate": lambda model, batch: None}, "must return a dict .*, got NoneType"),
    "maps as measures": (
        {"evaluate": lambda model, batch: {"a": (model(batch), 1)}},
        "a Tensor of shape .*'a'; give num",
    ),
}


@pytest.mark.parametrize("case", RESULTS)
def test_what_a_recipes_functions_return(case: str, tmp_path: Path) -> None:
    fields, words = RESULTS[case]
    right: dict[str, Any] = {
        "model": lambda: nn.Conv2d(1, 1, 1),
        "loss": lambda model, batch: model(batch).mean(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "data": lambda: [COLUMNS[0]] * 2,
        "batch_size": 1,
        "steps": 1,
    }
    if "evaluate" in fields:
        right["evaluation_data"] = right["data"]
    with pytest.raises(ff.FullframeError, match=words):
        ff.fit(ff.Recipe(**right | fields), ff.Strategy(), tmp_path / "run")
