"""Strategies as JSON, and what their errors name."""

import json
import re

import pytest

from fullframe.errors import StrategyError
from fullframe.strategy import Strategy, describe, divisors, multiplied


def test_json_both_ways():
    strategy = Strategy(data=2, height=3, width=4, microbatches=5, recompute="blocks", recompute_modules=("stages.*",))
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert json.loads(strategy.to_json())["recompute_modules"] == ["stages.*"]
    assert Strategy.from_json('{"width": 2}') == Strategy(width=2)
    assert strategy.ranks == 24
    volumes = Strategy(data=2, depth=3, width=4)
    assert Strategy.from_json(volumes.to_json()) == volumes and (volumes.parts, volumes.ranks) == (12, 24)
    assert list(volumes.mesh.items()) == [("data", 2), ("depth", 3), ("height", 1), ("width", 4)]
    assert strategy.mesh == {"data": 2, "height": 3, "width": 4}
    assert describe(volumes) == "data 2 x depth 3 x width 4, fp32"
    assert multiplied(volumes.mesh) == "data 2 x depth 3 x height 1 x width 4"


@pytest.mark.parametrize("value", [False, True, "all", ("encoder.*", "head")])
def test_what_to_compile_is_read_back(value):
    strategy = Strategy(width=2, compile=value)
    assert Strategy.from_json(strategy.to_json()) == strategy and hash(strategy) is not None
    assert Strategy.from_json(json.dumps({"compile": value})).compile == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"widht": 2}', "unknown strategy field 'widht'; the fields are data, depth, height, width, microbatches"),
        ('{"depth": 0}', "strategy.depth must be a whole number >= 1, got 0"),
        ('{"width": 0}', "strategy.width must be a whole number >= 1, got 0"),
        ('{"width": 1.0}', "strategy.width must be a whole number >= 1, got 1.0"),
        ('{"width": true}', "strategy.width must be a whole number >= 1, got True"),
        ("[1]", "must be one JSON object, got list"),
        ("{width: 1}", "is not JSON"),
    ],
)
def test_json_that_is_wrong(text, message):
    with pytest.raises(StrategyError, match=message.replace("(", r"\(")):
        Strategy.from_json(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "fp8"}, "strategy.precision must be one of 'fp32', 'tf32', 'bf16', 'fp16', got 'fp8'"),
        ({"offload": 1}, "strategy.offload must be one of False, True, got 1"),
        ({"recompute": "budget"}, "recompute_budget_bytes None; give the bytes with recompute='budget'"),
        ({"recompute_budget_bytes": 5}, "give the bytes with recompute='budget', and only then"),
        ({"compile": "encoder.*"}, "compile must be False, True, \"all\", or names of modules, got 'encoder.*'"),
        ({"compile": 1}, 'compile must be False, True, "all", or names of modules, got 1'),
        ({"compile": ()}, 'compile must be False, True, "all", or names of modules, got ()'),
        (
            {"compile": ("a",), "stages": 2},
            "compile was not made for stages > 1; leave one out, or",
        ),
        ({"recompute_modules": ("a",)}, "recompute is 'none'; use 'blocks'"),
        ({"clip_norm": 0.0}, "clip_norm must be greater than 0, got 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm must be greater than 0, got nan"),
        ({"ema_decay": 1.0}, "ema_decay must be from 0 to below 1, got 1.0"),
        ({"shard_optimizer": True, "shard_parameters": True}, "leave out shard_optimizer"),
        ({"update_in_backward": True, "microbatches": 2, "clip_norm": 1.0}, "microbatches > 1, clip_norm needs all"),
    ],
)
def test_fields_that_do_not_hold(fields, message):
    with pytest.raises(StrategyError, match=re.escape(message)):
        Strategy(**fields)


def test_fields_are_named_and_frozen():
    with pytest.raises(TypeError):
        Strategy(2)
    with pytest.raises(AttributeError):
        Strategy().width = 2


def test_all_divisors_are_found_of_large_numbers_too():
    assert [divisors(n) for n in (0, 1, 2, 12, 16)] == [[], [1], [1, 2], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16]]
    assert len(divisors(10**15)) == 256  # one by one it would take years
