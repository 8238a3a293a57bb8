"""Which functions of a file can hold anything that a rule looks for: those with certain words, and who calls them."""

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator

_WORDS = re.compile(
    r"backward\b|\.step\b|zero_grad|DataLoader|\.eval\b|checkpoint\w*\(|empty_cache|torch\.load\b|init_process_group|"
    r"\bamp\b|autocast|GradScaler|DataParallel|\bVariable\b|local.rank|clip_grad_|\bsave\(|detect_anomaly|__getitem__|"
    r"upsample|nn\.init\.|apex|convert_sync|fully_shard|OutOfMemory|out of memory|CrossEntropy|cross_entropy|"
    r"\bcat\(|interpolate\(|_with_logits|WithLogits|nll_loss|NLLLoss|set_to_none|"
    r"def training_step|criterion\w*\(|loss_f\w*\(|"
    r"\b(?:wait_for_everyone|allreduce\w*|allgather|all_reduce|barrier|broadcast\w*)\(|"
    r"\b(?:all_gather\w*|reduce\w*|scatter|gather\w*|all_to_all)\("
)
_COLLECTS = re.compile(r"self\.\w+\.(?:append|extend|add|update|insert)\(")
_IN_FORWARD = re.compile(r"self\.\w+[^=\n]{0,40}?(?<![=!<>])=(?!=)|\)\.(?:to|cuda)\(")
_ACTIVATES = re.compile(r"^ +(\w+) = [\w.]*(?:relu|act|sigmoid|tanh)\w*\((?!\1\))\w+\)", re.MULTILINE)
_ACTIVATIONS = 3  # to a new name, with which a forward may have FF114: four, or three and one that is returned
_ROUNDS, _MANY = 3, 200

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def has_words(source: str) -> bool:
    """Whether anything can be found at all."""
    return bool(_WORDS.search(source)) or "def forward" in source


def wanted(source: str, tree: ast.Module) -> set[int]:
    """The ids of the functions and classes of `tree` worth to be run by themselves."""
    ends = [match.end() for match in re.finditer(r"\n", source)]
    functions = list(_functions(tree.body))
    found = set(_with(functions, _lines(_WORDS, source, ends)))
    forwards = [f for f in functions if f.name == "forward"]
    if forwards:
        found |= set(_with(forwards, _lines(_IN_FORWARD, source, ends)))
        found |= set(_with(functions, _lines(_COLLECTS, source, ends)))
        found |= set(_with(forwards, _lines(_ACTIVATES, source, ends), _ACTIVATIONS))
    new = found
    for _ in range(_ROUNDS):
        names = {f.name for f in functions if id(f) in new and not f.name.startswith("__")} - {"forward"}
        if len(names) > _MANY:
            return {id(f) for f in functions}
        if not names:
            break
        callers = set(_with(functions, _lines(re.compile(rf"\b(?:{'|'.join(sorted(names))})\("), source, ends)))
        new, found = callers - found, found | callers
    return found


def _functions(body: list[ast.stmt]) -> Iterator[Function]:
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, Function):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers"):
            stack += getattr(node, field, ())


def _lines(pattern: re.Pattern[str], source: str, ends: list[int]) -> list[int]:
    """The numbers of the lines in which the pattern is found, rising."""
    return [bisect_left(ends, match.start() + 1) + 1 for match in pattern.finditer(source)]


def _with(functions: list[Function], lines: list[int], least: int = 1) -> Iterator[int]:
    """Those with so many of the lines."""
    for function in functions:
        first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        position = bisect_left(lines, first) + least - 1
        if position < len(lines) and lines[position] <= (function.end_lineno or first):
            yield id(function)
