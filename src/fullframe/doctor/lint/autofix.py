"""Mends what has one sure remedy, with libcst, so that all else in the file stays as it is written."""

import ast
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fullframe.doctor.finding import Finding
from fullframe.errors import LintError

if TYPE_CHECKING:
    import libcst as cst

Place = tuple[int, int]  # line from 1, column from 1
Fixes = dict[str, Callable[[Any, Any], Any]]  # by code, what makes (libcst, node) another node, or None


def _libcst() -> Any:
    try:
        import libcst
    except ImportError as error:
        raise LintError('--fix needs libcst; install it with pip install "fullframe[autofix]"') from error
    return libcst


def mended(source: str, findings: Iterable[Finding]) -> tuple[str, list[Finding]]:
    """The source with all findings mended that can be, and those that were; raises LintError without libcst."""
    libcst = _libcst()
    wanted = {((f.line or 0), (f.column or 0)): f for f in findings if f.code in FIXES}
    if not wanted:
        return source, []
    wrapper = libcst.metadata.MetadataWrapper(libcst.parse_module(source))
    transformer = _transformer(libcst, wanted)
    new = wrapper.visit(transformer).code
    ast.parse(new)  # a remedy never leaves a file that cannot be read
    return new, transformer.done


def _transformer(libcst: Any, wanted: dict[Place, Finding]) -> Any:
    class Transformer(libcst.CSTTransformer):  # type: ignore[misc]
        METADATA_DEPENDENCIES = (libcst.metadata.PositionProvider,)

        def __init__(self) -> None:
            super().__init__()
            self.done: list[Finding] = []

        def leave_Call(self, original_node: "cst.Call", updated_node: "cst.Call") -> Any:
            return self._mended(original_node, updated_node, _OF_CALLS)

        def leave_AugAssign(self, original_node: "cst.AugAssign", updated_node: "cst.AugAssign") -> Any:
            return self._mended(original_node, updated_node, _OF_SUMS)

        def _mended(self, original: Any, updated: Any, fixes: Fixes) -> Any:
            start = self.get_metadata(libcst.metadata.PositionProvider, original).start
            place = start.line, start.column + 1
            finding = wanted.get(place)
            new = fixes[finding.code](libcst, updated) if finding is not None and finding.code in fixes else None
            if new is None:
                return updated
            self.done.append(wanted.pop(place))  # what is called of the result begins at the same place
            return new

    return Transformer()


def _detached_sum(libcst: Any, node: Any) -> Any:
    """`total += loss` -> `total += loss.detach()`; only of a plain name or attribute."""
    if not isinstance(node.value, libcst.Name | libcst.Attribute):
        return None
    return node.with_changes(value=_detached(libcst, node.value))


def _detached_argument(libcst: Any, node: Any) -> Any:
    """`losses.append(loss)` -> `losses.append(loss.detach())`."""
    if not _is_method(libcst, node, "append") or len(node.args) != 1:
        return None
    (argument,) = node.args
    if not isinstance(argument.value, libcst.Name | libcst.Attribute):
        return None
    return node.with_changes(args=[argument.with_changes(value=_detached(libcst, argument.value))])


def _is_method(libcst: Any, call: Any, name: str) -> bool:
    return isinstance(call.func, libcst.Attribute) and call.func.attr.value == name


def _detached(libcst: Any, value: Any) -> Any:
    return libcst.Call(func=libcst.Attribute(value=value, attr=libcst.Name("detach")))


def _not_reentrant(libcst: Any, node: Any) -> Any:
    """`checkpoint(f, x)` -> `checkpoint(f, x, use_reentrant=False)`."""
    plain = libcst.AssignEqual(
        whitespace_before=libcst.SimpleWhitespace(""), whitespace_after=libcst.SimpleWhitespace("")
    )
    keyword = libcst.Arg(keyword=libcst.Name("use_reentrant"), value=libcst.Name("False"), equal=plain)
    args = list(node.args)
    if args and isinstance(args[-1].comma, libcst.MaybeSentinel):
        args[-1] = args[-1].with_changes(comma=libcst.Comma(whitespace_after=libcst.SimpleWhitespace(" ")))
    return node.with_changes(args=[*args, keyword])


def _to_none(libcst: Any, node: Any) -> Any:
    """`zero_grad(set_to_none=False)` -> `zero_grad()`."""
    return node.with_changes(args=[]) if _is_method(libcst, node, "zero_grad") and len(node.args) == 1 else None


def _underscored(libcst: Any, node: Any) -> Any:
    """`nn.utils.clip_grad_norm(...)` -> `nn.utils.clip_grad_norm_(...)`; not of a name that was imported by itself."""
    if not isinstance(node.func, libcst.Attribute):
        return None
    name = node.func.attr.value
    if name.startswith("upsample"):
        return None
    return node.with_changes(func=node.func.with_changes(attr=libcst.Name(f"{name}_")))


_OF_SUMS: Fixes = {"FF101": _detached_sum}
_OF_CALLS: Fixes = {
    "FF102": _detached_argument,
    "FF151": _not_reentrant,
    "FF156": _to_none,
    "FF194": _underscored,
}
FIXES = _OF_SUMS | _OF_CALLS
