"""Train perception models on the full frame: split the image plane over ranks, keep the numbers of one process.

The public names are resolved on first use, so that `import fullframe` (and with it `fullframe --help`) loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "FullframeError", "Recipe", "ShardedLoader", "ShardedStream", "SpatialTensor", "Strategy", "TrainStep",
    "UnsupportedOp", "fit", "fixed_point", "from_local", "full", "init_mesh", "parallelize", "plan", "report", "rule",
    "scatter", "shard", "simulate", "unroll", "watch_leaks",
]  # fmt: skip

if TYPE_CHECKING:
    from fullframe.errors import FullframeError, UnsupportedOp
    from fullframe.model.parallelize import parallelize
    from fullframe.observation.leaks.watch import watch_leaks
    from fullframe.observation.report.report import report
    from fullframe.planning.plan import plan
    from fullframe.ranks.mesh import init_mesh
    from fullframe.recipe import Recipe
    from fullframe.simulation.simulate import simulate
    from fullframe.spatial.from_local import from_local, scatter
    from fullframe.spatial.rules.registry import rule
    from fullframe.spatial.shard import full, shard
    from fullframe.spatial.tensor import SpatialTensor
    from fullframe.strategy import Strategy
    from fullframe.techniques.unrolling.fixed_point import fixed_point
    from fullframe.techniques.unrolling.unroll import unroll
    from fullframe.training.loading.loader import ShardedLoader
    from fullframe.training.loading.stream import ShardedStream
    from fullframe.training.loop import fit
    from fullframe.training.step import TrainStep
else:
    # The same table as above, for the run; a test holds the two together.
    _HOMES = {
        "FullframeError": "fullframe.errors",
        "Recipe": "fullframe.recipe",
        "ShardedLoader": "fullframe.training.loading.loader",
        "ShardedStream": "fullframe.training.loading.stream",
        "SpatialTensor": "fullframe.spatial.tensor",
        "Strategy": "fullframe.strategy",
        "TrainStep": "fullframe.training.step",
        "UnsupportedOp": "fullframe.errors",
        "fit": "fullframe.training.loop",
        "fixed_point": "fullframe.techniques.unrolling.fixed_point",
        "from_local": "fullframe.spatial.from_local",
        "full": "fullframe.spatial.shard",
        "init_mesh": "fullframe.ranks.mesh",
        "parallelize": "fullframe.model.parallelize",
        "plan": "fullframe.planning.plan",
        "report": "fullframe.observation.report.report",
        "rule": "fullframe.spatial.rules.registry",
        "scatter": "fullframe.spatial.from_local",
        "shard": "fullframe.spatial.shard",
        "simulate": "fullframe.simulation.simulate",
        "unroll": "fullframe.techniques.unrolling.unroll",
        "watch_leaks": "fullframe.observation.leaks.watch",
    }

    _CONTRACTIONS = ("einsum", "tensordot", "transpose")  # for libraries that look for them by an array's type

    def __getattr__(name):
        home = "fullframe.spatial.contractions" if name in _CONTRACTIONS else _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'fullframe' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = globals()[name] = getattr(import_module(home), name)
        return value

    def __dir__():
        return [*__all__, "__version__"]
