"""A worker of an elastic job: which rank it is in each epoch, as the launcher says in the store that it serves.

An epoch is a time in which the same workers are there. The launcher writes `plan/EPOCH`, who is which rank, then
`epoch`; workers count themselves in `arrived/EPOCH` and begin once all have. `failed/EPOCH` is there once one died.
"""

import datetime
import json
import os
import sys
import time
from typing import Any

import torch.distributed as dist

from fullframe.horovod.exceptions import HorovodInternalError
from fullframe.horovod.rendezvous import Place

WORKER = "FULLFRAME_HOROVOD_WORKER"  # how the launcher calls this process
_POLL_SECONDS = 0.05


class Membership:
    """This worker in its job."""

    def __init__(self, worker: str, address: str, port: int, patience_seconds: float):
        timeout = datetime.timedelta(seconds=patience_seconds)
        self.store: Any = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        self.epoch = 0
        self._worker, self._patience = worker, patience_seconds

    def meet(self) -> Place:
        """Wait for the next epoch and all its workers; this one's place. Ends the process where it has none.

        Raises HorovodInternalError where they do not come.
        """
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            newest = self._newest()
            if newest > self.epoch:
                plan = json.loads(self.store.get(f"plan/{newest}"))
                if self._worker not in plan:
                    sys.exit(0)  # the host is to be left
                place = Place(*plan[self._worker])
                self.store.add(f"arrived/{newest}", 1)
                if self._all_come(newest, place.size, deadline):
                    self.epoch = newest
                    return place
            time.sleep(_POLL_SECONDS)
        raise HorovodInternalError(f"the other workers did not come within {self._patience:g} s")

    def has_news(self) -> bool:
        """Whether hosts were added or removed since this epoch began."""
        return self._newest() > self.epoch

    def report_failure(self) -> None:
        """Ask the launcher for a new epoch."""
        self.store.add(f"lost/{self.epoch}", 1)

    def check(self) -> None:
        """Raise HorovodInternalError where a worker of this epoch is gone."""
        if self.store.check([f"failed/{self.epoch}"]):
            raise HorovodInternalError("a worker is gone")

    def _newest(self) -> int:
        return int(self.store.get("epoch"))

    def _all_come(self, epoch: int, size: int, deadline: float) -> bool:
        while self.store.add(f"arrived/{epoch}", 0) < size:
            if self._newest() > epoch or time.monotonic() > deadline:
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
