"""`fullframe export`: the weights of a run as one safetensors file."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fullframe.wording import plural


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's weights, from its newest readable checkpoint, as one safetensors file."""

    run_dir: Positional[Path]
    """The --run-dir of a run that has written a checkpoint."""
    out: Annotated[Path, arg(metavar="PATH")]
    """The file to write; its keys are those of the model's own state dict."""
    step: Annotated[int | None, arg(metavar="N")] = None
    """Take the checkpoint after this step in place of the newest."""
    best: bool = False
    """Take the best checkpoint, by the measure that recipe.best names, in place of the newest."""
    average: bool = False
    """The moving averages of the parameters (--ema-decay) in the place of their last values."""
    overwrite: bool = False
    """Replace a file that is there already."""
    json: bool = False
    """Print one JSON object on stdout."""

    def run(self) -> int:
        """Read, write, and say what was written."""
        from fullframe.training.checkpoints.export import export

        exported = export(
            self.run_dir, self.out, step=self.step, best=self.best, average=self.average, overwrite=self.overwrite
        )
        for problem in exported.problems:
            print(f"warning: {problem}", file=sys.stderr)
        if self.json:
            fields = {"path": str(exported.path), "step": exported.step, "tensors": exported.tensors}
            print(json.dumps(fields | {"size_bytes": exported.size_bytes}))
        else:
            size = f"{exported.size_bytes / 2**20:.1f} MiB"
            print(f"wrote {exported.path}: {plural(exported.tensors, 'tensor')}, {size}, after step {exported.step}")
        return 0
