"""`python -m benchmarks.gpu [--device cpu] [--out FILE.json] [--only part ...]`: one part after the other, printed."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks import machine
from benchmarks.gpu.parts import PARTS, Part, missing

_NO_GPU = (
    "there is no GPU that torch can use here: {reason}. On a machine that has one this command takes under ten "
    "minutes; --device cpu tries here what makes sense on a CPU"
)


def main(
    device: Literal["cuda", "cpu"] = "cuda",
    out: Path | None = None,
    only: tuple[str, ...] = (),
    list: bool = False,
    patience: float = 1.0,
) -> int:
    """Ask a GPU everything that only a GPU can say; prints Markdown. The exit code is 1 where anything failed.

    Args:
        device: "cpu" tries the parts themselves, on small things.
        out: Write everything as JSON, after each part.
        only: Names of the parts to run, also several with commas between; all without.
        list: Print the parts and end.
        patience: What the time of each part is multiplied by, for a machine that is busy.
    """
    wanted = [name for names in only for name in names.split(",") if name]
    unknown = sorted(set(wanted) - {part.name for part in PARTS})
    if list or unknown:
        print(*(f"no part is called {name}" for name in unknown), sep="\n", end="\n" * bool(unknown))
        print(*(f"{part.name}: {part.seconds:g} s at most, {part.gpus} GPUs" for part in PARTS), sep="\n")
        return 2 if unknown else 0
    gpus = 0
    if device == "cuda":
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus:
            print(_NO_GPU.format(reason=f"torch {torch.__version__}, CUDA {torch.version.cuda}"))
            return 2
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "device": device, "parts": {}}
    print(f"# GPU benchmark, {results['date']}\n\n{results['machine']}, {gpus} GPUs\n", flush=True)
    with tempfile.TemporaryDirectory() as cache:  # what is calibrated here is read here alone
        for part in PARTS:
            if wanted and part.name not in wanted:
                continue
            results["parts"][part.name] = found = run(part, device, gpus, cache, patience)
            print(markdown(part.name, found), flush=True)
            if out is not None:
                out.write_text(json.dumps(results, indent=1) + "\n")
    failed = {name: len(found["failures"]) for name, found in results["parts"].items() if found["failures"]}
    print(f"failed: {failed}" if failed else "nothing failed")
    return 1 if failed else 0


def run(part: Part, device: str, gpus: int, cache: str, patience: float = 1.0) -> dict[str, Any]:
    """The part in its processes, ended when its time is over: seconds, rows, failures; why, where it is skipped."""
    why = missing(part, device, gpus)
    if why:
        return {"seconds": 0.0, "rows": [], "failures": [], "skipped": why}
    started = time.monotonic()
    ranks = part.ranks or min(gpus, 8)
    with tempfile.TemporaryDirectory() as folder:
        file, store, logs = Path(folder) / "found.json", Path(folder) / "store", []
        processes = []
        port = _free_port()
        for rank in range(ranks):
            environment = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONHASHSEED": "0"}
            if device == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            if ranks > 1:
                places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                environment |= {name: str(value) for name, value in places.items()}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            log = (Path(folder) / f"log{rank}").open("w+")
            logs.append(log)
            words = [sys.executable, "-m", "benchmarks.gpu.child", part.name, device, str(file), str(store)]
            processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True))
        failures = _waited(processes, part.seconds * patience)
        for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
            log.seek(0)
            if process.returncode:
                last = [line for line in log.read().splitlines() if line.strip()][-3:]
                failures.append(f"rank {rank} ended with {process.returncode}: {' / '.join(last)}")
            log.close()
        found = json.loads(file.read_text()) if file.is_file() else {"rows": [], "failures": []}
    found["failures"] = failures + found["failures"]
    return {"seconds": time.monotonic() - started, **found}


def _waited(processes: "list[subprocess.Popen[bytes]]", seconds: float) -> "list[str]":
    """Until all are done, one of several has failed, or the time is over; what is left is ended with its children."""
    until, failures = time.monotonic() + seconds, []
    while any(process.poll() is None for process in processes):
        if time.monotonic() > until:
            failures.append(f"not done after {seconds:g} s")
            break
        if any(process.returncode for process in processes):
            time.sleep(2.0)  # for the others to say why
            break
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return failures


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def markdown(name: str, found: dict[str, Any]) -> str:
    """A heading, a table a kind of row, the failures."""
    if "skipped" in found:
        return f"## {name}\n\nskipped: {found['skipped']}\n"
    lines = [f"## {name} ({found['seconds']:.0f} s)", ""]
    headings: tuple[str, ...] = ()
    for row in found["rows"]:
        if tuple(row) != headings:
            headings = tuple(row)
            lines += ["", "| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
        lines.append("| " + " | ".join(map(_text, row.values())) + " |")
    lines += [""] + [f"- FAILED: {failure}" for failure in found["failures"]] + [""] * bool(found["failures"])
    return "\n".join(lines)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
