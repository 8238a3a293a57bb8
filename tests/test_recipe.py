"""Recipes from files, and what their errors name."""

import os
import sys
from pathlib import Path

import pytest
from torch import nn

import fullframe as ff
from fullframe.errors import RecipeError
from fullframe.recipe import load_recipe, values_of
from tests.training.tiny import Network, recipe

RECIPE = """
import torch
import fullframe as ff

def recipe():
    return ff.Recipe(
        model=lambda: torch.nn.Conv2d(3, 3, 1),
        loss=lambda model, batch: model(batch["image"]).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: [],
        batch_size=2,
        {more}
    )
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "job.py"
    path.write_text(text)
    return path


def test_load_recipe(tmp_path):
    recipe = load_recipe(written(tmp_path, RECIPE.format(more="seed=7")))
    assert (recipe.batch_size, recipe.seed, recipe.workers) == (2, 7, 0)


def test_a_recipe_imports_the_files_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("SEED = 11\n")
    text = "from beside_it import SEED\n" + RECIPE.format(more="seed=SEED")
    assert load_recipe(written(tmp_path, text)).seed == 11


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_like_this\n", "job.py, line 1 (import nothing_like_this): ModuleNotFoundError"),
        ("x = 1\ndef recipe(:\n", "job.py, line 2 (def recipe(:): SyntaxError"),
        ("def inner():\n    return 1 / 0\ninner()\n", "job.py, line 2 (return 1 / 0): ZeroDivisionError"),
        ("def recipe():\n    return {}['a']\n", "job.py, line 2 (return {}['a']): KeyError"),
        (
            "from .model import Net\n",
            "job.py, line 1 (from .model import Net): ImportError: attempted relative import with no known parent "
            "package; "
            "a recipe is read as a file of its own: put it beside the package, and import by the whole name",
        ),
        ("x = 1\n", "job.py has no function recipe()"),
        ("recipe = 3\n", "job.py has no function recipe()"),
        ("def recipe():\n    return 3\n", "recipe() must return a fullframe.Recipe, got int"),
        (RECIPE.format(more="seed=-1"), "recipe.seed must be a whole number >= 0, got -1"),
        (RECIPE.format(more="steps=0"), "recipe.steps must be a whole number >= 1, got 0"),
        (RECIPE.format(more="finish=3"), "recipe.finish must be a function, got 3"),
        (
            RECIPE.format(more="").replace("model=lambda: torch", "model=torch"),
            "recipe.model must be a function () -> nn.Module, got the module Conv2d",
        ),
        (
            RECIPE.format(more="")
            .replace("loss=lambda", "loss=torch.nn.L1Loss() or (lambda")
            .replace(".mean(),", ".mean()),"),
            "recipe.loss must be a function (model, batch) -> scalar, got the module L1Loss",
        ),
        (RECIPE.format(more="finish=lambda model: None"), "recipe.finish is called as <lambda>(model, run_dir)"),
        (RECIPE.format(more="").replace("model=lambda:", "model=lambda size:"), "missing a required argument: 'size'"),
        (RECIPE.format(more="").replace("loss=lambda model, batch", "loss=lambda batch"), "too many positional"),
        (RECIPE.format(more="evaluate=print"), "recipe.evaluate is given without recipe.evaluation_data"),
        (RECIPE.format(more="batchsize=3"), "unexpected keyword argument 'batchsize'"),
        ("import os; os.chdir('/')" + RECIPE.format(more=""), "job.py changes the working directory"),
    ],
)
def test_a_recipe_that_is_wrong_names_the_place(tmp_path, text, message):
    start = Path.cwd()
    with pytest.raises(RecipeError) as error:
        load_recipe(written(tmp_path, text))
    assert message in str(error.value)
    assert Path.cwd() == start


def test_a_place_is_named_by_a_relative_path_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, message in (
        ("x = 1\ndef recipe(:\n", "job.py, line 2 (def recipe(:): SyntaxError"),
        ("def recipe():\n    return {}['a']\n", "job.py, line 2 (return {}['a']): KeyError"),
        (
            "from .model import Net\n",
            "job.py, line 1 (from .model import Net): ImportError: attempted relative import with no known parent "
            "package; "
            "a recipe is read as a file of its own: put it beside the package, and import by the whole name",
        ),
    ):
        with pytest.raises(RecipeError) as error:
            load_recipe(written(tmp_path, text).relative_to(tmp_path))
        assert str(error.value).startswith(message)


def test_a_recipe_that_was_written_again_in_the_same_second_is_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for value in (3, 4):
        path = written(tmp_path, RECIPE.format(more=f"seed={value}"))
        os.utime(path, (1e9, 1e9))
        assert load_recipe(path).seed == value


def test_no_recipe_file(tmp_path):
    with pytest.raises(RecipeError, match=r"there is no recipe file .*missing\.py"):
        load_recipe(tmp_path / "missing.py")
    with pytest.raises(RecipeError, match=r"give the \.py file itself"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"not a Python file; a recipe's name ends in \.py"):
        (tmp_path / "job.txt").write_text("")
        load_recipe(tmp_path / "job.txt")


def test_values_of_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text("def recipe(lr, name='x', *, size=(1, 2)):\n    raise ValueError((lr, name, size))\n")
    values = values_of(["lr=1e-3", "name=resnet 50; $(x)", "size=(3,4)"])
    assert values == {"lr": 1e-3, "name": "resnet 50; $(x)", "size": (3, 4)}
    assert values_of(["a=True", "b='1'", "c=", "d=x=y"]) == {"a": True, "b": "1", "c": "", "d": "x=y"}
    with pytest.raises(RecipeError, match=r"ValueError: \(0.001, 'resnet 50; \$\(x\)', \(3, 4\)\)"):
        load_recipe(path, values)
    with pytest.raises(RecipeError, match=r"recipe\(\) takes lr, name, size: .*'lrr'.*--set name=value"):
        load_recipe(path, {"lr": 1, "lrr": 1})
    for words, said in ((["lr"], "no value"), (["l r=1"], "no value"), (["lr=1", "lr=2"], "twice")):
        with pytest.raises(RecipeError, match=said):
            values_of(words)


def test_a_model_that_comes_in_eval_mode_is_trained_and_that_is_said(tmp_path: Path) -> None:
    def half_frozen() -> Network:
        model = Network()
        model.body[1].eval()
        return model

    with pytest.warns(UserWarning, match=r"recipe.model\(\) gives a model in eval mode"):
        trained = ff.fit(recipe(model=lambda: Network().eval(), steps=1), ff.Strategy(), tmp_path / "run")
    assert int(trained.body[1].num_batches_tracked) == 1
    assert not recipe(model=half_frozen).training_model().body[1].training


class _Distilled(nn.Module):
    """Keeps its teacher in eval mode, as soon as a loop calls train()."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)), nn.BatchNorm2d(3)
        self.student[1].eval()

    def train(self, mode: bool = True) -> "_Distilled":
        super().train(mode)
        self.teacher.eval()
        return self


class _Trainer(nn.Module):
    """Trains: another thing than nn.Module's."""

    def train(self, data: str = "") -> None:  # type: ignore[override]
        raise AssertionError


def test_a_models_own_train_says_what_stays_in_eval_mode() -> None:
    model = recipe(model=_Distilled).training_model()
    modes = [module.training for module in (model, model.student[0], model.student[1], model.teacher)]
    assert modes == [True, True, False, False]
    assert recipe(model=_Trainer).training_model().training
