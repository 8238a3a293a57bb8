"""What the machine is, as driver and torch say it."""

import shutil
import subprocess

import torch

from benchmarks import machine
from benchmarks.gpu.found import Found


def facts(kind: str) -> Found:
    """GPUs, driver, libraries, what torch was built for, and its defaults for TF32."""
    found = Found()
    found.note(what="machine", value=machine())
    if shutil.which("nvidia-smi"):
        query = "index,name,driver_version,memory.total,power.limit,clocks.max.sm"
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
        )
        found.note(what=f"nvidia-smi: {query}", value=said.stdout.strip().replace("\n", "; "))
    if kind == "cpu":
        return found
    properties = torch.cuda.get_device_properties(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    for what, value in (
        (
            "torch",
            f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}",
        ),
        ("device", f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory} bytes"),
        ("built for", " ".join(torch.cuda.get_arch_list())),
        ("TF32 by default", f"matmul {torch.backends.cuda.matmul.allow_tf32}, cuDNN {torch.backends.cudnn.allow_tf32}"),
    ):
        found.note(what=what, value=value)
    return found
