"""The public names, frozen: adding or removing one is a decision, made here and in the changelog."""

import ast
import inspect
import re
from importlib import import_module

import pytest

import fullframe

PUBLIC = {
    "FullframeError",
    "Recipe",
    "ShardedLoader",
    "ShardedStream",
    "SpatialTensor",
    "Strategy",
    "TrainStep",
    "UnsupportedOp",
    "fit",
    "fixed_point",
    "from_local",
    "full",
    "init_mesh",
    "parallelize",
    "plan",
    "report",
    "rule",
    "scatter",
    "shard",
    "simulate",
    "unroll",
    "watch_leaks",
}


def homes_for_type_checkers() -> dict[str, str]:
    """Name -> module, as the `if TYPE_CHECKING` block of `fullframe/__init__.py` imports them."""
    block = next(
        node
        for node in ast.parse(inspect.getsource(fullframe)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {
        alias.asname or alias.name: node.module or ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_public_names_are_frozen() -> None:
    assert set(fullframe.__all__) == PUBLIC
    assert len(fullframe.__all__) == len(PUBLIC)
    assert set(dir(fullframe)) == PUBLIC | {"__version__"}


def test_type_checkers_see_the_names_where_the_run_finds_them() -> None:
    assert homes_for_type_checkers() == fullframe._HOMES
    assert set(fullframe._HOMES) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_name_resolves_and_says_what_it_is(name: str) -> None:
    value = getattr(fullframe, name)
    assert value is getattr(import_module(fullframe._HOMES[name]), name)
    assert callable(value)
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__  # not a parent's
    assert text and text.strip(), f"fullframe.{name} has no docstring"
    assert not text.startswith(f"{name}("), f"fullframe.{name} has only the docstring that dataclass makes up"


def test_errors_have_one_root() -> None:
    assert issubclass(fullframe.UnsupportedOp, fullframe.FullframeError)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'paralelize'; it has .*parallelize"):
        _ = fullframe.paralelize


def test_version_is_three_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", fullframe.__version__)
