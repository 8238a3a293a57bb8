"""Horovod's environment variables, as far as they say how to work."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the ranks of this process work together; read once, by `init`."""

    fusion_bytes: int = 64 << 20  # small tensors are reduced together in buffers of so many; 0: each by itself
    gradient_bytes: int = 25 << 20  # gradients begin to travel in groups of so many, while others are computed
    cycle_seconds: float = 0.001  # between two looks at what the ranks ask for, while any waits
    stall_seconds: float = 60.0  # after which a warning names the ranks that are missing; 0: never
    connect_seconds: float = 600.0  # until all ranks have come
    timeout_seconds: float = 1800.0  # of a collective that has begun

    @classmethod
    def from_environment(cls) -> "Settings":
        """Those of `HOROVOD_FUSION_THRESHOLD`, `HOROVOD_CYCLE_TIME` and the others, with Horovod's defaults."""
        stall = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "60"))
        fusion = os.environ.get("HOROVOD_FUSION_THRESHOLD")
        sizes = {} if fusion is None else {"fusion_bytes": int(fusion), "gradient_bytes": int(fusion)}
        return cls(
            **sizes,
            cycle_seconds=float(os.environ.get("HOROVOD_CYCLE_TIME", "1")) / 1000,
            stall_seconds=0.0 if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("0", "") else stall,
            connect_seconds=float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "600")),
        )
