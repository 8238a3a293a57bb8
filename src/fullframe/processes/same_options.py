"""The machines of a job are started by one command, and some of what it says each of them acts on by itself."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fullframe.errors import MeshError


class Started(NamedTuple):
    """A machine by its --node-rank, with the words behind each option that it was given."""

    node: int
    options: Mapping[str, str]

    def said(self, name: str) -> str:
        """What it was told by an option."""
        return f"{name} {self.options[name]}".rstrip() if name in self.options else f"no {name}"


def require_same_options(machines: Sequence[Started]) -> None:
    """Raises MeshError where a machine was given other options than the first."""
    first = machines[0]
    for other in machines[1:]:
        known = {*first.options, *other.options}
        names = sorted(name for name in known if first.options.get(name) != other.options.get(name))
        if names:
            said = [", ".join(map(machine.said, names)) for machine in (first, other)]
            raise MeshError(
                f"node {first.node} was started with {said[0]}, node {other.node} with {said[1]}; give all nodes the "
                "same options, but for --node-rank"
            )
