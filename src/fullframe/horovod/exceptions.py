"""What Horovod's users catch."""

from fullframe.errors import FullframeError


class HorovodInternalError(FullframeError, RuntimeError):
    """A collective did not come about: a rank is gone, or the ranks asked for what does not fit together."""


class RequestError(HorovodInternalError, ValueError):
    """The ranks' own requests are at fault, so that trying again, as `elastic.run` does, would not help."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed. `skip_sync` is there for Horovod's sake: `elastic.run` always sends the state."""

    def __init__(self, skip_sync: bool = False):
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync
