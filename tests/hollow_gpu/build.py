"""Builds the stand-in for the driver, CUDA's runtime and NCCL, for the torch of this Python."""

import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE.parents[1] / "build" / "hollow_gpu" / "libcuda.so.1"
_LIBRARIES = ("torch_cuda", "c10_cuda", "torch_python", "torch_cuda_linalg", "caffe2_nvrtc")
_OF_CUDA = re.compile(r"(__cuda|cuda|cu[A-Z]|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|nvrtc)\w*$")
_SONAME = "-Wl,-soname,libnvrtc.so.13"  # by which torch looks for the compiler of its complex kernels
_C = ("cc", "-O1", "-Wall", "-fPIC", "-shared", _SONAME, *(f"-D__CUDA_{n}_H__" for n in ("FP16", "BF16", "FP8")))


def build() -> Path:
    """The library, made anew where a source is newer; what torch wants and no source has is a function that gives 0."""
    sources = [HERE / "runtime.c", HERE / "nccl.c"]
    if LIBRARY.exists() and all(LIBRARY.stat().st_mtime > source.stat().st_mtime for source in sources):
        return LIBRARY
    site = Path(sysconfig.get_path("purelib"))
    headers = [f"-I{site / 'nvidia' / name / 'include'}" for name in ("cu13", "cudnn", "nccl")]
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        first, stubs = Path(folder) / "first.so", Path(folder) / "stubs.c"
        subprocess.run([*_C, *headers, *sources, "-o", first, "-lpthread"], check=True)
        wanted = set[str]().union(*(_names(site / "torch" / "lib" / f"lib{n}.so", "undefined") for n in _LIBRARIES))
        missing = sorted(name for name in wanted - _names(first, "defined") if _OF_CUDA.match(name))
        stubs.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in missing))
        subprocess.run([*_C, *headers, *sources, stubs, "-o", LIBRARY, "-lpthread"], check=True)
    return LIBRARY


def _names(library: Path, kind: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", f"--{kind}-only", library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line}
