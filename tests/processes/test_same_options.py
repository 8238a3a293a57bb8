"""Machines that were started by other options than the first are named, with both."""

import pytest

from fullframe.errors import MeshError
from fullframe.processes.same_options import Started, require_same_options


def test_the_same_options_are_no_error() -> None:
    require_same_options([Started(0, {})])
    require_same_options([Started(0, {"--width": "2"}), Started(1, {"--width": "2"}), Started(3, {"--width": "2"})])


def test_what_differs_is_named_with_both() -> None:
    machines = [Started(0, {"--width": "2", "--min-nodes": "1"}), Started(2, {"--width": "2", "--deterministic": ""})]
    said = "node 0 was started with no --deterministic, --min-nodes 1, node 2 with --deterministic, no --min-nodes; "
    with pytest.raises(MeshError, match=f"^{said}give all nodes the same options, but for --node-rank$"):
        require_same_options([machines[0], machines[0], machines[1]])
