"""One rank of `fullframe doctor run`: `python -m fullframe.cli.doctor.rank REQUEST`."""

import sys
from pathlib import Path


def main() -> None:
    """Take the steps that the file asks for; leaves the process."""
    from fullframe.processes.orphans import die_with_launcher

    die_with_launcher()
    from fullframe.cli.comparison import measured
    from fullframe.cli.strategy_file import with_batch_size
    from fullframe.doctor.rehearsal.rank import Request, run_rank

    request = Request.from_json(Path(sys.argv[1]).read_text())
    run_rank(request, lambda recipe: with_batch_size(recipe, request.batch_size), measured)


if __name__ == "__main__":
    main()
