"""What the benchmark is made of: each part runs in processes of its own, for so long at most."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """One question.

    name:    as `--only` has it; also the function that answers it, in `module`, given "cuda" or "cpu"
    seconds: after which it is ended and counts as failed
    ranks:   processes that run it together; 0: as many as there are GPUs, at most 8
    gpus:    that it needs; 0: one, which ranks may share by gloo
    on_cpu:  whether `--device cpu` makes sense
    """

    name: str
    module: str
    seconds: float
    ranks: int = 1
    gpus: int = 1
    on_cpu: bool = True
    function: str = ""

    @property
    def by_nccl(self) -> bool:
        """Whether each rank has a GPU."""
        return self.gpus > 1


PARTS = (
    Part(name="facts", module="facts", seconds=10),
    Part(name="kernels", module="kernels", seconds=60),
    Part(name="precision", module="kernels", seconds=25),
    Part(name="exact", module="exact", seconds=50, ranks=2),
    Part(name="exact_4", module="exact", seconds=60, ranks=4, function="exact"),
    Part(name="loopback", module="loopback", seconds=30),
    Part(name="calibrate", module="calibrate", seconds=45),
    Part(name="memory_time", module="memory_time", seconds=130),
    Part(name="lone_rank", module="lone_rank", seconds=80),
    Part(name="faults", module="faults", seconds=80),
    Part(name="offload", module="offload", seconds=30),
    Part(name="exact_nccl", module="exact", seconds=60, ranks=2, gpus=2, on_cpu=False, function="exact"),
    Part(name="exact_nccl_4", module="exact", seconds=70, ranks=4, gpus=4, on_cpu=False, function="exact"),
    Part(name="bound", module="several", seconds=100, ranks=0, gpus=2, on_cpu=False),
    Part(name="calibrate_link", module="calibrate", seconds=90, gpus=2, on_cpu=False),
)


def missing(part: Part, device: str, gpus: int) -> str:
    """Why the part cannot run here; "" where it can."""
    if device == "cpu":
        return "" if part.on_cpu else "it asks about GPUs"
    return "" if gpus >= part.gpus else f"it needs {part.gpus} GPUs, there {'is' if gpus == 1 else 'are'} {gpus}"
