"""What a processor computes wrongly: judged, and asked of this one."""

import math
import os
import subprocess
import sys

from fullframe.doctor.environment.numbers import judged_numbers


def test_what_is_more_than_rounding_is_found_where_ranks_compute_on_processors() -> None:
    assert [finding.code for finding in judged_numbers(1.3, gpu_is_there=False)] == ["FF227"]
    (finding,) = judged_numbers(math.nan, gpu_is_there=False)
    assert "wide is NaN" in finding.message and "ONEDNN_MAX_CPU_ISA" in finding.fix
    assert [*judged_numbers(0.004, gpu_is_there=False), *judged_numbers(1.3, gpu_is_there=True)] == []


def test_with_the_remedy_nothing_is_wrong_here() -> None:
    """In a process of its own, as oneDNN looks at the variable once."""
    code = "from fullframe.doctor.environment.numbers import narrow_convolution_error as e; print(e())"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert 0 < float(told.stdout) < 0.01
