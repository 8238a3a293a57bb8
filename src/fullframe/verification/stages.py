"""Which calls of the step in one process a rank makes whose stage has some parts of a chain of modules alone.

A chain is a module whose parts are on stages: its parts are what its forward calls. Each rank counts the calls of every
module from 0, and one that leaves out the parts of others would count on from the wrong number.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fullframe.verification.verdict import Place


class StagedCalls:
    """Of each chain, by its path, the parts that this rank runs: `shares()`, known when the first of them is called.

    places: of the step in one process, in order of execution
    """

    def __init__(self, places: Sequence[Place], shares: Callable[[], Mapping[str, range]]):
        self._places, self._shares = places, shares
        self._chain: str | None = None  # whose parts run now
        self._before: dict[str, list[int]] = {}  # by the path of a module, where in `places` its calls begin
        begun: set[tuple[str, int]] = set()
        for position, place in enumerate(places):
            if (place.path, place.call) not in begun:
                begun.add((place.path, place.call))
                self._before.setdefault(place.path, []).append(position)

    def entering(self, caller: str | None, calls: Counter[str]) -> None:
        """Before a module is called: where it is the first part of a chain, go on from what went before in one process.

        caller: the path of the module whose forward calls it
        calls:  of each module so far, by its path; changed
        """
        share = self._shares().get(caller) if caller is not None and self._chain is None else None
        if share is None or caller is None:
            return
        number = calls[caller] - 1  # of the chain's call
        given = (place for place in self._within(caller, number) if place.caller == caller)
        parts = list(dict.fromkeys((place.path, place.call) for place in given))
        self._chain = caller
        if share.start < len(parts):
            self._go_on_from(self._before[parts[share.start][0]][parts[share.start][1]], calls)

    def leaving(self, place: Place, calls: Counter[str]) -> bool:
        """At an output of a module: whether it is a chain's, of which all that came before has then been run.

        calls: of each module so far, by its path; changed
        """
        if place.path != self._chain:
            return place.kind == "output" and place.path in self._shares()
        self._chain = None
        self._go_on_from(self._position(place), calls)
        return True

    def begins_part(self, place: Place) -> bool:
        """Whether it is what a part of a chain gets: a tensor that was made outside, or by the part before."""
        return place.kind == "input" and place.caller is not None and place.caller == self._chain

    def _go_on_from(self, position: int, calls: Counter[str]) -> None:
        for path, positions in self._before.items():
            calls[path] = sum(before < position for before in positions)

    def _within(self, path: str, call: int) -> Sequence[Place]:
        found = [n for n, place in enumerate(self._places) if (place.path, place.call) == (path, call)]
        return self._places[found[0] : found[-1] + 1] if found else ()

    def _position(self, place: Place) -> int:
        return next((n for n, other in enumerate(self._places) if other[:4] == place[:4]), len(self._places))
