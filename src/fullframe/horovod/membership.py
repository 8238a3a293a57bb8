"""A worker of an elastic job: which rank it is in each epoch, as the launcher says in the store that it serves.

An epoch is a time in which the same workers are there. The launcher writes `plan/EPOCH`, who is which rank, then
`epoch`; workers count themselves in `arrived/EPOCH` and begin once all have. `failed/EPOCH` is there once one died, or
left for the next one.
"""

import datetime
import json
import os
import sys
import time

import torch.distributed as dist

from fullframe.horovod.exceptions import HorovodInternalError
from fullframe.horovod.rendezvous import Place

WORKER = "FULLFRAME_HOROVOD_WORKER"  # how the launcher calls this process
_POLL_SECONDS = 0.05


class Membership:
    """This worker in its job."""

    def __init__(self, worker: str, address: str, port: int, patience_seconds: float):
        self._worker, self._address, self._port, self._patience = worker, address, port, patience_seconds
        self._plans = self.connected()
        self.epoch = 0

    def connected(self) -> dist.TCPStore:
        """The store by a connection of its own: what waits for other ranks keeps all others from asking by the same."""
        timeout = datetime.timedelta(seconds=self._patience)
        return dist.TCPStore(self._address, self._port, is_master=False, timeout=timeout, wait_for_workers=False)

    def meet(self) -> Place:
        """Wait for the next epoch and all its workers; this one's place. Ends the process where it has none.

        Raises HorovodInternalError where they do not come.
        """
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            newest = self._newest()
            if newest > self.epoch:
                plan = json.loads(self._plans.get(f"plan/{newest}"))
                if self._worker not in plan:
                    sys.exit(0)  # the host is to be left
                self.epoch, place = newest, Place(*plan[self._worker])
                self._plans.add(f"arrived/{newest}", 1)
                if self._all_come(place.size, deadline):
                    return place
            time.sleep(_POLL_SECONDS)
        raise HorovodInternalError(f"the other workers did not come within {self._patience:g} s")

    def has_news(self) -> bool:
        """Whether hosts were added or removed since this epoch began."""
        return self._newest() > self.epoch

    def is_over(self) -> bool:
        """Whether not all workers of this epoch are in it any more."""
        return self.has_news() or bool(self._plans.check([f"failed/{self.epoch}"]))

    def report_failure(self) -> None:
        """Ask the launcher for a new epoch."""
        self._plans.add(f"lost/{self.epoch}", 1)

    def check(self) -> None:
        """Raise HorovodInternalError where a worker of this epoch is gone."""
        if self._plans.check([f"failed/{self.epoch}"]):
            raise HorovodInternalError("a worker is gone")

    def _newest(self) -> int:
        return int(self._plans.get("epoch"))

    def _all_come(self, size: int, deadline: float) -> bool:
        while self._plans.add(f"arrived/{self.epoch}", 0) < size:
            if self.has_news() or time.monotonic() > deadline:
                self._plans.set(f"failed/{self.epoch}", "1")  # another may have seen all come by now
                return False
            time.sleep(_POLL_SECONDS)
        return True


class _Mine:
    membership: Membership | None = None


def membership() -> Membership | None:
    """That of this process; None where the launcher is not an elastic one."""
    if _Mine.membership is None and WORKER in os.environ:
        address, port = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        patience = float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", "600"))
        _Mine.membership = Membership(os.environ[WORKER], address, port, patience)
    return _Mine.membership
