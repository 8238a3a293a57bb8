"""What Python takes of a step beside the ops it issues: for a function on split tensors, an exchange, a reduction."""

from dataclasses import dataclass


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


# The host of a GPU that was not calibrated. Hosts differ, by perhaps a factor of two: `fullframe calibrate` measures.
USUAL_HOST = HostCosts(
    function_seconds=7e-6,
    exchange_seconds=185e-6,
    reduction_seconds=155e-6,
    source="an AMD EPYC of 2 shared cores, 2026-11-22, by `fullframe calibrate` with torch 2.13",
)
