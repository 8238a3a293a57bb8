"""Strategies from files: the winner of what `fullframe plan --out` wrote, or a run's strategy.json."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullframe.errors import StrategyError
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from fullframe.wording import plural


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
    if isinstance(found, dict) and found:
        return {"strategy": found, "prediction": None, "devices": None, "batch_size": None}
    plans = found if isinstance(found, list) and all(isinstance(p, dict) and "strategy" in p for p in found) else None
    if plans is None:
        raise StrategyError(f"{path} holds neither a list of plans nor a strategy; write it with fullframe plan --out")
    fitting: list[Mapping[str, Any]] = [plan for plan in plans if plan.get("fits")]
    if not fitting:
        raise StrategyError(
            f"{path} holds {plural(len(plans), 'strategy')}, and none fits; plan with more or larger GPUs, or more "
            "--seconds"
        )
    return fitting[0]


def strategy_of(plan: Mapping[str, Any]) -> Strategy:
    """The plan's strategy; raises StrategyError when a field is wrong."""
    return Strategy.from_json(json.dumps(plan["strategy"]))


def with_batch_size(recipe: Recipe, batch_size: int | None) -> Recipe:
    """The recipe with another batch size, where one is given."""
    return recipe if batch_size is None else replace(recipe, batch_size=batch_size)


def require_devices(plan: Mapping[str, Any], ranks: int, gpus: int) -> None:
    """Raises StrategyError where a plan for GPUs has more `ranks` on this machine than there are `gpus`.

    A plan for CPUs, and a strategy alone, says nothing of GPUs.
    """
    devices = plan.get("devices")
    if devices is None or devices.rpartition("x")[2] == "cpu":
        return
    if not gpus:
        raise StrategyError(
            f"the plan is for {devices}, and this machine has no GPU; plan for what is here (--gpus {ranks}xcpu), "
            f"or start its {ranks} ranks on the CPU all the same with --on-cpu"
        )
    if gpus < ranks:
        raise StrategyError(
            f"the plan is for {devices} and needs {ranks} GPUs, this machine has {gpus}; start its ranks on several "
            "machines with torchrun, or plan for what is here"
        )
