"""The examples with small settings: as recipes of their own, verified on two ranks and trained for a few steps."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import fullframe as ff
from fullframe.recipe import load_recipe
from fullframe.simulation.simulate import simulate
from fullframe.verification.verdict import Verdict
from tests.rank_group import rank_group
from tests.verification.forked import verified_by_a_fork

EXAMPLES = Path(__file__).parents[2] / "examples"
PNG = b"\x89PNG"


def module(example: str, name: str) -> Any:
    """A file of the example, which finds those beside it."""
    folder, unique = EXAMPLES / example, f"{example}_{name}"
    if unique not in sys.modules:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        spec = importlib.util.spec_from_file_location(unique, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[unique] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[unique])
    return sys.modules[unique]


def small(example: str, folder: Path, **values: Any) -> Path:
    """A recipe file in `folder` that is `example`'s with these values."""
    path = folder / f"{example}.py"
    path.write_text(
        "from fullframe.recipe import load_recipe\n\n\ndef recipe():\n"
        f"    return load_recipe({str(EXAMPLES / example / 'recipe.py')!r}, {values!r})\n"
    )
    return path


def verified(path: Path, strategy: ff.Strategy) -> Verdict:
    """The verdict of two ranks."""
    return rank_group(2).run(verified_by_a_fork, path, strategy)[0]  # type: ignore[no-any-return]


def trained(path: Path, folder: Path, strategy: ff.Strategy = ff.Strategy()) -> list[dict[str, Any]]:  # noqa: B008
    """The records of a run in one process."""
    ff.fit(load_recipe(path), strategy, folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def predicted_bytes(path: Path, strategy: ff.Strategy) -> int:
    """The peak of a rank as `fullframe plan` reckons it."""
    return simulate(load_recipe(path), strategy).peak_bytes
