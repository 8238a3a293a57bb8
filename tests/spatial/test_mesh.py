"""What a mesh leaves behind. What it is for is tested wherever ranks split tensors."""

from pathlib import Path

from fullframe.launching.local import launch

JOB = """
import atexit, os, sys
from pathlib import Path

def threads():
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]

def ended():  # the first to be registered is called last
    (Path(sys.argv[1]) / os.environ["RANK"]).write_text(" ".join(threads()))

atexit.register(ended)

import torch.distributed as dist
import fullframe as ff
from fullframe.spatial.mesh import spatial_of

def work():
    mesh = ff.init_mesh(width=2)
    spatial_of(mesh)
    dist.barrier(mesh.get_group("width"))
    assert any("gloo" in name for name in threads())
    dist.destroy_process_group()

work()
"""


def test_no_thread_of_gloo_outlives_the_job(tmp_path: Path) -> None:
    """One that still puts a message away when Python ends aborts the process, after all its work was done."""
    assert launch(2, ["-c", JOB, str(tmp_path)]) == 0
    for rank in range(2):
        names = (tmp_path / str(rank)).read_text()
        assert names and "gloo" not in names
