"""`verify` whose process for the reference is a fork of one that has torch loaded, which takes no seconds to start.

Like the process of its own that it stands for, it has never been a rank.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fullframe.strategy import Strategy
from fullframe.verification import reference
from fullframe.verification.verdict import Verdict
from fullframe.verification.verify import verify
from tests.rank_group import CONTEXT


def verified_by_a_fork(path: Path, strategy: Strategy, **options: Any) -> Verdict:
    with mock.patch.object(reference, "compute", _compute):
        return verify(path, strategy, **options)


def _compute(recipe: Path, folder: Path, values: Sequence[str] = ()) -> None:
    process = CONTEXT.Process(target=_alone, args=(recipe, folder, values))
    process.start()
    process.join()
    assert process.exitcode == 0, "see the traceback on stderr"


def _alone(recipe: Path, folder: Path, values: Sequence[str]) -> None:
    assert not torch.distributed.is_initialized()
    torch.set_num_threads(1)
    reference.main(recipe, folder, values)
