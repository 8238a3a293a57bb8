"""Words of the command line: options for `TECHNIQUES`, a command as the words that say it again, and counts."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from tyro.conf import OmitArgPrefixes, Positional, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from fullframe.errors import FullframeError, MeshError
from fullframe.strategy import TECHNIQUES, Strategy
from fullframe.technique import Compile

Count = Annotated[int | None, arg(metavar="N")]
_POSITIONAL = get_args(Positional[int])[1:]
_SAID_NOTHING = arg(help_behavior_hint="")

# An option with or without values.
_COMPILE = PrimitiveConstructorSpec[Compile](
    nargs="*",
    metavar="[all | NAME ...]",
    instance_from_str=lambda given: True if not given else "all" if given == ["all"] else tuple(given),
    is_instance=lambda value: isinstance(value, (bool, str, tuple)),
    str_from_instance=lambda value: _given(value),
)
_SPECS: dict[str, tuple[PrimitiveConstructorSpec[Any], ...]] = {"compile": (_COMPILE,)}


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """How a step is made to fit: every field of the strategy but the mesh."""


def technique_options(strategy: type[Strategy] = Strategy) -> type[Techniques]:
    """`Techniques` with a field for each row of the table, in the order of the strategy's fields."""
    types = get_type_hints(strategy)
    rows = {technique.name: technique for technique in TECHNIQUES}
    options = [
        (
            field.name,
            Annotated[
                types[field.name],
                arg(help=rows[field.name].help, metavar=rows[field.name].metavar or None),
                *_SPECS.get(field.name, ()),
            ],
            dataclasses.field(default=field.default),
        )
        for field in dataclasses.fields(strategy)
        if field.name in rows
    ]
    return dataclasses.make_dataclass(
        "Techniques", options, bases=(Techniques,), namespace={"__doc__": Techniques.__doc__}, frozen=True, kw_only=True
    )


TechniqueOptions = technique_options()
TechniqueWords = Annotated[Techniques, OmitArgPrefixes, arg(constructor=TechniqueOptions)]


def without_empty_defaults(options: Any) -> None:
    """Leave "(default: None)" and "(default: False)", and None as a choice, out of what --help says of options."""
    types = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        if field.default is None or field.default is False or field.default == ():
            options.__annotations__[field.name] = Annotated[types[field.name], _SAID_NOTHING, *_spec(types[field.name])]


def _spec(kind: Any) -> list[PrimitiveConstructorSpec[Any]]:
    """Of `X | None` how X alone is read: None is what is not given, and has no word."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    inner = [each for each in get_args(kind) if each is not type(None)]
    if len(inner) != 1 or len(get_args(kind)) != 2:
        return []
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(inner[0], set()))
    assert isinstance(spec, PrimitiveConstructorSpec)
    return [dataclasses.replace(spec, is_instance=lambda value: value is None or spec.is_instance(value))]


def changed(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    fields = dataclasses.fields(options)
    return {f.name: value for f in fields if (value := getattr(options, f.name)) != f.default}


def words(command: Any) -> list[str]:
    """The words of the command line that make this command; without those for defaults."""
    kinds, found, behind = get_type_hints(type(command), include_extras=True), list[str](), list[str]()
    for name, value in changed(command).items():
        if dataclasses.is_dataclass(value):
            found += words(value)
        elif get_args(kinds[name])[1:2] == _POSITIONAL and isinstance(value, tuple):
            behind += ["--", *map(str, value)]
        elif get_args(kinds[name])[1:2] == _POSITIONAL:
            found.insert(0, str(value))
        else:
            found += [option(name), *_given(value)]
    return found + behind


def option(name: str) -> str:
    """The word for a field: --batch-size."""
    return f"--{name.replace('_', '-')}"


def require_counts(options: Any, names: Iterable[str], error: type[FullframeError] = MeshError, least: int = 1) -> None:
    """Raise `error` where one of these options is given, and is less than it may be."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise error(f"{option(name)} must be at least {least}, got {value}")


def _given(value: Any) -> list[str]:
    """The words that follow an option."""
    return list(map(str, value if isinstance(value, tuple) else () if value is True else (value,)))
