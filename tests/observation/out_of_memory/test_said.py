"""The numbers in what allocators say; the sentences are those that people have posted, with other numbers."""

import pytest
import torch

from fullframe.observation.out_of_memory.said import sizes_said

GIB, MIB = 2**30, 2**20
NOW = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 15.75 GiB of which 512.00 MiB is "
    "free. Process 4711 has 1.00 GiB memory in use. Process 12 has 256.00 MiB memory in use. Including non-PyTorch "
    "memory, this process has 14.00 GiB memory in use. Of the allocated memory 11.25 GiB is allocated by PyTorch, and "
    "2.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
)
CASES = [
    (
        NOW,
        {
            "asked_bytes": 2560 * MIB,
            "limit_bytes": 16128 * MIB,
            "free_bytes": 512 * MIB,
            "process_bytes": 14 * GIB,
            "allocated_bytes": 11520 * MIB,
            "unused_bytes": 2 * GIB,
            "others_bytes": 1280 * MIB,
        },
    ),
    (  # from within a container: which of the processes is this one is not known
        "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 4.00 GiB of which 0 bytes is "
        "free. Process 99 has 3.90 GiB memory in use.",
        {"asked_bytes": 20 * MIB, "limit_bytes": 4 * GIB, "free_bytes": 0},
    ),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", {}),
    ("", {}),
]


@pytest.mark.parametrize(("error", "sizes"), CASES)
def test_the_numbers_in_a_message(error: str, sizes: dict[str, int]) -> None:
    assert sizes_said(error) == sizes


def test_what_torch_really_says_on_the_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert sizes_said(str(caught.value)) == {"asked_bytes": 2**50}
