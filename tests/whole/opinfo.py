"""Every op and module of torch's own database on split tensors against plain torch.

`python -m tests.whole.opinfo [--json] [--ops add,amax] [--mesh 1x2] [--samples N] [--write]`; exits with 1 when
anything is wrong, differs over the ranks, hangs, or raises what plain torch does not.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.rank_group import RankFailure, rank_group
from tests.whole.report import summary, write_document
from tests.whole.verdicts import names, run_chunk

MESHES = ((1, 2), (2, 1), (2, 2), (1, 3))
SAMPLES = 24
CHUNK = 25  # entries
CHUNK_SECONDS = 1800.0
MOST_HANGS = 3  # of one entry on one mesh; the rest of its cases is then left out
FAULTS = ("wrong", "disagree", "hang", "foreign")
Mesh = tuple[int, int]


class Result(NamedTuple):
    """A case on all ranks of a mesh."""

    entry: str
    mesh: Mesh
    case: dict[str, Any]
    text: str
    numel: int
    verdict: str  # exact, refused, error agrees, skipped, or one of FAULTS
    detail: str


class Kept:
    """The results of an earlier run on one mesh, in a file of one JSON line each; `add` puts more there."""

    def __init__(self, path: Path | None, mesh: Mesh):
        self._path, self._mesh = path, mesh
        found: dict[tuple[str, int], Result] = {}
        self.done: set[str] = set()
        for line in path.read_text().splitlines() if path and path.exists() else ():
            facts = json.loads(line)
            if tuple(facts.pop("mesh")) != mesh:
                continue
            if "complete" in facts:
                self.done |= set(facts["complete"])
            else:
                found[facts["entry"], facts["case"]["number"]] = Result(mesh=mesh, **facts)
        self.results = [result for result in found.values() if result.entry in self.done]

    def add(self, results: Sequence[Result], complete: Sequence[str]) -> None:
        """Append results, and the names of the entries that are complete."""
        if self._path is not None:
            with self._path.open("a") as file:
                for result in results:
                    file.write(json.dumps(result._asdict()) + "\n")
                file.write(json.dumps({"mesh": self._mesh, "complete": list(complete)}) + "\n")


def run(
    entries: Sequence[str],
    mesh: Mesh,
    most: int,
    say: Callable[[str], None] = lambda line: None,
    kept: Kept | None = None,
    work: Callable[..., None] = run_chunk,
) -> list[Result]:
    """All cases of the named entries on one mesh. A hang ends its ranks; new ones go on after it."""
    pending = [(name, 0) for name in entries]
    results: list[Result] = []
    hangs: Counter[str] = Counter()
    while pending:
        chunk, rest = pending[:CHUNK], pending[CHUNK:]
        start = time.monotonic()
        found, left = _chunk(chunk, mesh, most, work)
        results += found
        if left:
            name = left[0][0]
            hangs[name] += 1
            if hangs[name] >= MOST_HANGS:
                left = left[1:]
        pending = left + rest
        if kept is not None:
            kept.add(found, [name for name, _ in chunk if name not in {name for name, _ in left}])
        counts = Counter(result.verdict for result in found)
        done = f"{len(entries) - len(pending)}/{len(entries)}"
        say(f"{mesh[0]}x{mesh[1]} {done} to {chunk[-1][0]}: {dict(counts)} in {time.monotonic() - start:.0f} s")
    return results


def _chunk(
    chunk: list[tuple[str, int]], mesh: Mesh, most: int, work: Callable[..., None]
) -> tuple[list[Result], list[tuple[str, int]]]:
    """The results of some entries, and what is left to do when a rank hung or died."""
    ranks = mesh[0] * mesh[1]
    with tempfile.TemporaryDirectory() as folder:
        failure = ""
        try:
            rank_group(ranks).run(work, chunk, mesh, most, folder, timeout_seconds=CHUNK_SECONDS)
        except RankFailure as error:
            failure = str(error)
        lines = [_read(Path(folder) / f"{rank}.jsonl") for rank in range(ranks)]
    results = _merged(lines, mesh)
    if not failure:
        return results, []
    begun = [line for line in lines[0] if "begin" in line] or [line for line in lines[-1] if "begin" in line]
    known = {(r.entry, r.case["number"]) for r in results}
    stuck = next((line for line in begun if (line["begin"], line["number"]) not in known), None)
    if stuck is None:
        raise RuntimeError(f"the ranks failed between two cases: {failure}")
    died = "the process died" in failure or "no answer within" in failure
    detail = _who(lines, stuck) if died else "a rank raised outside a case: " + failure[-300:]
    key = stuck["begin"], stuck["number"]
    if any(key not in {(d.get("survived"), d.get("number")) for d in own} for own in lines):
        results.append(_result(stuck, mesh, "skipped", f"plain torch does not survive it: {detail}"))
    else:
        results.append(_result(stuck, mesh, "hang", detail))
    position = next(n for n, (name, _) in enumerate(chunk) if name == stuck["begin"])
    return results, [(stuck["begin"], stuck["number"] + 1), *chunk[position + 1 :]]


def _read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _who(lines: list[list[dict[str, Any]]], stuck: dict[str, Any]) -> str:
    key = stuck["begin"], stuck["number"]
    waits = [n for n, own in enumerate(lines) if key not in {(d.get("done"), d.get("number")) for d in own}]
    raised = [f"rank {n} raised {d['raised']}" for n, own in enumerate(lines) for d in own
              if "raised" in d and (d["entry"], d["number"]) == key]  # fmt: skip
    return "; ".join([f"ranks {waits} did not finish", *raised])


def _merged(lines: list[list[dict[str, Any]]], mesh: Mesh) -> list[Result]:
    """One result for each case that every rank finished; the worst rank's, when they differ."""
    done = [{(d["done"], d["number"]): d for d in own if "done" in d} for own in lines]
    results = []
    for begun in (line for line in lines[0] if "begin" in line):
        key = begun["begin"], begun["number"]
        if not all(key in own for own in done):
            continue
        each = [own[key] for own in done]
        verdicts = {d["verdict"] for d in each}
        worst = next((v for v in FAULTS if v in verdicts), each[0]["verdict"])
        if worst == "disagree" or len(verdicts) > 1:
            worst = "disagree" if "disagree" in verdicts else worst
            detail = "; ".join(f"rank {n}: {d['detail'] or d['verdict']}" for n, d in enumerate(each))
        else:
            detail = each[0]["detail"]
        results.append(_result(begun, mesh, worst, detail))
    return results


def _result(begun: dict[str, Any], mesh: Mesh, verdict: str, detail: str) -> Result:
    case = {**begun["case"], "number": begun["number"]}
    return Result(begun["begin"], mesh, case, begun["text"], begun["numel"], verdict, detail)


def every_name() -> list[str]:
    """All entries, in torch's order."""
    return list(rank_group(2).run(names, timeout_seconds=CHUNK_SECONDS)[0])


def named(wanted: str, known: Sequence[str]) -> list[str]:
    """The entries that a comma-separated list asks for: by full name, family, or the last part of it."""
    asked = {name for name in wanted.split(",") if name}
    return [name for name in known if asked & {name, name.split(" ")[-1], *name.split("."), name.rsplit(".", 1)[-1]}]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ops", default="", help="only these, by name: add,amax,nn.functional.conv2d")
    parser.add_argument("--mesh", action="append", default=[], help="1x2; may be given again (all of them)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"of each kind of case ({SAMPLES})")
    parser.add_argument("--keep", type=Path, help="append results to this file; what it holds already is not run again")
    parser.add_argument("--write", action="store_true", help="write docs/ops.md")
    options = parser.parse_args()
    say = lambda line: print(line, file=sys.stderr if options.json else sys.stdout, flush=True)  # noqa: E731
    meshes = [tuple(map(int, text.split("x"))) for text in options.mesh] or list(MESHES)
    entries = every_name()
    if options.ops:
        entries = named(options.ops, entries)
    results: list[Result] = []
    for mesh in meshes:
        kept = Kept(options.keep, mesh)
        results += kept.results
        results += run([name for name in entries if name not in kept.done], mesh, options.samples, say, kept)
    facts = summary(results)
    if options.json:
        print(json.dumps({**facts, "results": [r._asdict() for r in results]}))
    else:
        for r in results:
            if r.verdict in FAULTS:
                kind = ", ".join(f"{k}={v}" for k, v in r.case.items())
                print(f"{r.verdict} on {r.mesh[0]}x{r.mesh[1]}: {r.text}\n    {kind}\n    {r.detail}")
        print(json.dumps({name: value for name, value in facts.items() if name != "ops"}, indent=1))
    if options.write:
        write_document(results)
    return 1 if any(r.verdict in FAULTS for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
