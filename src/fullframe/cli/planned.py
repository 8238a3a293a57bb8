"""Strategies from files: the winner of what `fullframe plan --out` wrote, or a run's strategy.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullframe.errors import StrategyError
from fullframe.strategy import Strategy


def first_plan(path: Path) -> Mapping[str, Any]:
    """The best plan in the file, as `Plan.as_dict` gives it; a strategy alone is a plan without a prediction.

    Raises StrategyError when the file is neither, or when none of its plans fits.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise StrategyError(f"cannot read the plan {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise StrategyError(f"{path} is not JSON: {error}; write it with fullframe plan --out") from error
    if isinstance(found, dict):
        return {"strategy": found, "prediction": None, "devices": None}
    plans = found if isinstance(found, list) and all(isinstance(p, dict) and "strategy" in p for p in found) else None
    if plans is None:
        raise StrategyError(f"{path} holds neither a list of plans nor a strategy; write it with fullframe plan --out")
    fitting: list[Mapping[str, Any]] = [plan for plan in plans if plan.get("fits")]
    if not fitting:
        raise StrategyError(f"none of the {len(plans)} strategies in {path} fits; plan with more or larger GPUs")
    return fitting[0]


def strategy_of(plan: Mapping[str, Any]) -> Strategy:
    """The plan's strategy; raises StrategyError when a field is wrong."""
    return Strategy.from_json(json.dumps(plan["strategy"]))
