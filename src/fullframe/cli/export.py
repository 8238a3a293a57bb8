"""`fullframe export`: the weights of a run as one safetensors file."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's weights, from its newest readable checkpoint, as one safetensors file."""

    run_dir: Positional[Path]
    """The --run-dir of a run that has written a checkpoint."""
    out: Annotated[Path, arg(metavar="PATH")]
    """The file to write; its keys are those of the model's own state dict."""
    average: bool = False
    """The moving averages of the parameters (--ema-decay) in the place of their last values."""
    json: bool = False
    """Print one JSON object on stdout."""

    def run(self) -> int:
        """Read, write, and say what was written."""
        from fullframe.training.checkpoints.export import export

        exported = export(self.run_dir, self.out, average=self.average)
        for problem in exported.problems:
            print(f"warning: {problem}", file=sys.stderr)
        if self.json:
            fields = {"path": str(exported.path), "step": exported.step, "tensors": exported.tensors}
            print(json.dumps(fields | {"size_bytes": exported.size_bytes}))
        else:
            size = f"{exported.size_bytes / 2**20:.1f} MiB"
            print(f"wrote {exported.path}: {exported.tensors} tensors, {size}, after step {exported.step}")
        return 0
