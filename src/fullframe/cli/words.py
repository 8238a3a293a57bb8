"""Options of the command line: those of `TECHNIQUES`, and a command as the words that say it again."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

from tyro.conf import OmitArgPrefixes, Positional, arg

from fullframe.strategy import TECHNIQUES, Strategy

_POSITIONAL = get_args(Positional[int])[1:]


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
            Annotated[types[field.name], arg(help=rows[field.name].help, metavar=rows[field.name].metavar or None)],
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


def changed(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    fields = dataclasses.fields(options)
    return {f.name: value for f in fields if (value := getattr(options, f.name)) != f.default}


def words(command: Any) -> list[str]:
    """The words of the command line that make this command; without those for defaults."""
    kinds, found = get_type_hints(type(command), include_extras=True), list[str]()
    for name, value in changed(command).items():
        if dataclasses.is_dataclass(value):
            found += words(value)
        elif get_args(kinds[name])[1:2] == _POSITIONAL:
            found.insert(0, str(value))
        else:
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            found += [f"--{name.replace('_', '-')}", *map(str, values)]
    return found
