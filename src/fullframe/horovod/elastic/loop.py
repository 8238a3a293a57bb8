"""`elastic.run`: a training function called again, from its last commit, whenever the workers change."""

import functools
from collections.abc import Callable
from typing import Any

from fullframe.horovod.context import init, shutdown
from fullframe.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt, RequestError
from fullframe.horovod.membership import membership


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Have `func(state, ...)` begin with everybody's state alike, and begin again when workers fail, come or go.

    After a failure the state is that of the last `commit`; after hosts were added or removed as it is. Needs a launcher
    that starts workers again: under any other a failure is raised. So is what trying again would not help.
    """

    @functools.wraps(func)
    def again_and_again(state: Any, *args: Any, **kwargs: Any) -> Any:
        anew = False
        while True:
            try:
                if anew:
                    shutdown()
                    init()
                    state.on_reset()
                state.sync()
                return func(state, *args, **kwargs)
            except RequestError:
                raise
            except HorovodInternalError:
                member = membership()
                if member is None:
                    raise
                member.report_failure()
                state.restore()
            except HostsUpdatedInterrupt:  # sent all the same: a worker may have come since it was raised
                pass
            anew = True

    return again_and_again
