"""What kernels and messages reach of a data sheet's peaks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a data sheet's peak that kernels reach, and what else takes time.

    Of matmul, the convolutions and memory fitted, in round numbers, to published step times of one card and held
    against others' (`benchmarks/published`); the rest is assumed.

    matmul, convolution, grouped, attention: of the matrix units' rate for the dtype; grouped: of convolutions
    depthwise: of the vector units' rate; a convolution with one channel a group has no matrix product in it
    memory, link, network, host: of the bandwidth
    kernel_seconds: what the shortest kernel takes
    segment_seconds: what the driver takes for memory that it gave back and is asked for again
    message_host_seconds: what NCCL needs of the host for each of its groups; Python's share is in `Device.host`
    fsdp_launches, fsdp_parameter_launches: what the host needs for one gather or reduction of FSDP2, and for each
        parameter in it, in the time that it needs to issue an op; of a DTensor in an op's arguments: dtensor_launches.
        By the Python around them, measured: docs/devices.md
    """

    matmul: float = 0.9
    convolution: float = 0.8
    grouped: float = 0.5
    attention: float = 0.5
    depthwise: float = 0.07
    memory: float = 0.77
    link: float = 0.8
    network: float = 0.8
    host: float = 0.8
    kernel_seconds: float = 3e-6
    segment_seconds: float = 1e-3
    message_host_seconds: float = 30e-6
    fsdp_launches: float = 20.0
    fsdp_parameter_launches: float = 1.4
    dtensor_launches: float = 0.25


MEASURED = Efficiency(matmul=1, convolution=1, grouped=1, memory=1, link=1, network=1, host=1, kernel_seconds=0,
                      message_host_seconds=0)  # fmt: skip
