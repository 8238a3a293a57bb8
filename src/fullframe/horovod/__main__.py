"""`python -m fullframe.horovod SCRIPT ...`: run a Horovod script unmodified, as one rank of torchrun, Slurm or none.

`torchrun --nproc-per-node 4 -m fullframe.horovod train.py`, `srun -n 4 python -m fullframe.horovod train.py`.
"""

import os
import runpy
import sys
from pathlib import Path

SITE = Path(__file__).parent / "site"  # where `import horovod` finds ours


def main() -> None:
    """Run the script as `python SCRIPT ...` would, but for `import horovod`."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    sys.path.insert(1, str(SITE))
    # A loader's workers and whatever else the script starts.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
