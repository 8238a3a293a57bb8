"""`horovod.common.exceptions`."""

from fullframe.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
