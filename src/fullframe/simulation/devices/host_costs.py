"""What Python takes of a step beside the ops it issues: for a function on split tensors, an exchange, a reduction."""

from dataclasses import dataclass

# Of a compiled block, by those of blocks as they are: its text run with kernels that do nothing, on the host below and
# in one run with them (33 and 6.7, 125 and 150, 35 and 92 microseconds), by a throw-away script.
_PROGRAM, _ITS_EXCHANGE, _ITS_REDUCTION = 5.0, 0.83, 0.38


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Seconds of one thread of the host, each beyond what issuing the aten ops takes; nothing unless given.

    function_seconds:  of a torch function on split tensors, beyond the same on plain ones
    exchange_seconds:  of an exchange with the neighbours: cut, posted, joined; forward or backward
    reduction_seconds: of a sum or gather of a norm or a loss over the ranks of a replica
    source:            on which processor they were measured, when and how
    """

    function_seconds: float = 0.0
    exchange_seconds: float = 0.0
    reduction_seconds: float = 0.0
    source: str = ""

    @property
    def program_seconds(self) -> float:
        """Of a compiled block, forward or backward, beyond its kernels."""
        return _PROGRAM * self.function_seconds

    def exchange(self, in_program: bool) -> float:
        """`exchange_seconds`, less where a compiled block does it."""
        return self.exchange_seconds * (_ITS_EXCHANGE if in_program else 1.0)

    def reduction(self, in_program: bool) -> float:
        """`reduction_seconds`, less where a compiled block does it."""
        return self.reduction_seconds * (_ITS_REDUCTION if in_program else 1.0)


# The host of a GPU that was not calibrated. Hosts differ, by perhaps a factor of two: `fullframe calibrate` measures.
USUAL_HOST = HostCosts(
    function_seconds=7e-6,
    exchange_seconds=185e-6,
    reduction_seconds=155e-6,
    source="an AMD EPYC of 2 shared cores, 2026-11-22, by `fullframe calibrate` with torch 2.13",
)
