"""Ten lines of a terminal, of a GPU and of the CPU."""

from fullframe.observation.out_of_memory.account import of_record
from fullframe.observation.out_of_memory.words import ten_lines
from tests.observation.run_writer import WAYS, out_of_memory

MIB = 2**20
GPU = """\
rank 1 ran out of memory in step 201, in forward, and so did ranks 2, 3; 0.586 GiB were asked for; going on with 2
  at examples/stereo_depth/recipe.py:41 (cost = correlation(left, right)), in module encoder.stages.0 (Stage)
  tensors held 12.9 GiB; 1.66 GiB more were reserved and in no tensor (fragmentation); the device has 15.8 GiB, 0.293 \
GiB free; other processes had 0.5 GiB of it; what was asked for was there, in pieces: \
PYTORCH_ALLOC_CONF=expandable_segments:True joins them
  live at the peak of step 2, which was followed: activation 1.66 GiB, optimizer 0.43 GiB, parameter 0.215 GiB; most \
activations: encoder.stages.0.blocks.0 0.293 GiB, encoder.stages.1.blocks.0 0.146 GiB, encoder.stages.2.blocks.0 100 MiB
these would fit on 2xV100-16GB, by simulation, fastest first:
  fullframe train examples/stereo_depth/recipe.py --width 2 --precision bf16 --microbatches 2 --run-dir runs/first \
--resume  # 11.6 GiB a rank, 430 ms a step
  fullframe train examples/stereo_depth/recipe.py --width 2 --precision bf16 --recompute blocks --run-dir runs/first \
--resume  # 9.47 GiB a rank, 520 ms a step
  fullframe train examples/stereo_depth/recipe.py --height 2 --precision bf16 --microbatches 4 --run-dir runs/first \
--resume  # 7.91 GiB a rank, 610 ms a step
out of memory: runs/first/oom.html"""


def lines(goes_on: str = "", **changes: object) -> list[str]:
    found = of_record(out_of_memory(**changes))
    assert found is not None
    return ten_lines(found, "runs/first/oom.html", goes_on)


def test_of_a_gpu_with_all_there_is_to_say() -> None:
    assert "\n".join(lines("going on with 2", ways=WAYS, others=[2, 3])) == GPU
    assert len(GPU.splitlines()) < 10, "with the line that says what takes a while"


def test_of_the_cpu_there_is_no_fragmentation() -> None:
    unknown = dict.fromkeys(("allocated_bytes", "reserved_bytes", "others_bytes"))
    found = lines(**unknown, host_bytes=900 * MIB, limit_bytes=8192 * MIB, free_bytes=64 * MIB)
    assert found[2] == (
        "  the process held 0.879 GiB; 64 MiB were free of the machine's 8 GiB; no fragmentation to tell of: on the "
        "CPU torch keeps no pool"
    )


def test_of_an_evaluation() -> None:
    found = lines(phase="evaluation", asked_bytes=2048 * MIB, live={}, problem="Smaller frames help.")
    assert found[0] == "rank 1 ran out of memory in the evaluation after step 201; 2 GiB were asked for"
    assert found[-2:] == ["  Smaller frames help.", "out of memory: runs/first/oom.html"]


def test_where_little_is_known_little_is_said() -> None:
    found = of_record({"step": 3, "problem": "fullframe plan: error: a sample has no tensor with rows and columns"})
    assert found is not None
    assert ten_lines(found, "oom.html") == [
        "rank 0 ran out of memory in step 3",
        "  no other strategy to name: fullframe plan: error: a sample has no tensor with rows and columns",
        "out of memory: oom.html",
    ]
