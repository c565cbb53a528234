"""Which entry of a checkpoint goes to which place of a state that names things otherwise. Pure.

Problem: a fine-tuning run wraps, renames or drops modules. Renaming rules in the field are applied to the names of the
state in one tool and to those of the checkpoint in another, to the model alone so that the optimizer's moments are
lost, and two sources that end in one place overwrite each other in silence.

Way taken: a rule is a regular expression and a replacement, ``{old: new}``, applied to a parameter's name as
``re.sub`` does, one rule after another. It reads from the checkpoint to the state: what the rules make of a stored name
is the name in the state. Where that brings nothing to a place of the state, the same rules are applied to the state's
name, and say where in the checkpoint to look: rules written for tools of the other direction work too. Two stored
names that end in one place are an error that names both. In an optimizer's keys (``state.{fqn}.{name}``,
``param_groups.{fqn}.{name}``) it is the parameter's name inside that is renamed. Skip patterns are searched for in the
parameter's name, the state's or the checkpoint's: what they match is neither loaded, nor missing, nor in the way.

Flow: ``Renaming(rename, skip)`` → ``sources(stored, naming)`` before the state is known (a template may be made of it)
→ ``place(wanted)`` → names to match, names that are skipped.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dcpfs.errors import ConfigError, KeyMismatchError

__all__ = [
    "FqnNaming",
    "Placement",
    "RenameRules",
    "Renaming",
    "SourceNames",
    "find_optimizer_prefixes",
    "optimizer_fqns",
]

RenameRules = Mapping[str, str] | Callable[[str], str]
"""Regular expression to replacement, or a function from a name to a name."""

_OPTIMIZER_NAME = re.compile(r"((?:state|param_groups)\.)(.+)(\.[^.]+)", re.DOTALL)


class FqnNaming(enum.Enum):
    """Where in a flat key the parameter's name is."""

    PLAIN = "plain"
    """The key is the name."""
    OPTIMIZER = "optimizer"
    """``state.{fqn}.{name}`` and ``param_groups.{fqn}.{name}``."""


@dataclass(frozen=True)
class Placement:
    """What goes where.

    Attributes:
        sources: Name in the state to name in the checkpoint, for all that is placed.
        skipped_wanted: Names of the state that are left as they are.
        skipped_stored: Names of the checkpoint that nobody is meant to ask for.
        fqns: Parameter's name in the checkpoint to that in the state, for those placed under another name.
    """

    sources: dict[str, str] = field(default_factory=dict)
    skipped_wanted: tuple[str, ...] = ()
    skipped_stored: tuple[str, ...] = ()
    fqns: dict[str, str] = field(default_factory=dict)


class Renaming:
    """Renaming and skipping by name. Remembers which rules matched; thread-safe when a given function is.

    Args:
        rename: Rules, or one function; None: names stay.
        skip: Regular expressions that are searched for in names; a plain text matches itself anywhere.

    Raises:
        ConfigError: A pattern is no regular expression, a replacement does not fit it, or one is given where a
            list is meant.
    """

    def __init__(self, rename: RenameRules | None = None, skip: Sequence[str] = ()) -> None:
        if isinstance(skip, str):
            raise ConfigError(f"skip is the text {skip!r}: give a list of patterns")
        self._function = rename if callable(rename) else None
        rules: Mapping[str, str] = {} if rename is None or callable(rename) else rename
        if not isinstance(rules, Mapping):
            raise ConfigError(f"rename is a {type(rules).__name__}: give a mapping of patterns, or a function")
        self._rules = [(_compile(pattern, "rename"), _check_template(pattern, new)) for pattern, new in rules.items()]
        self._skip = [_compile(pattern, "skip") for pattern in skip]
        self._used: set[re.Pattern[str]] = set()

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns that no name has matched so far: a mistake, more often than not."""
        patterns = (*(pattern for pattern, _ in self._rules), *self._skip)
        return tuple(pattern.pattern for pattern in patterns if pattern not in self._used)

    def describe_unused(self) -> str:
        """That patterns have matched nothing, as a part of a sentence; empty where all have."""
        if not self.unused:
            return ""
        patterns = ", ".join(f"'{pattern}'" for pattern in self.unused)
        return (
            f"no name matches {patterns} of the rename and skip rules, whose patterns are "
            "regular expressions for names without the key before them: '^head\\.' and not 'model/head.'"
        )

    @property
    def is_identity(self) -> bool:
        """It changes and skips nothing."""
        return not self._rules and not self._skip and self._function is None

    def apply(self, fqn: str) -> str:
        """A parameter's name after all rules, in their order.

        Raises:
            ConfigError: The function gave something else than text.
        """
        if self._function is not None:
            renamed = self._function(fqn)
            if not isinstance(renamed, str):
                raise ConfigError(
                    f"rename made {renamed!r} of the name {fqn!r}: return a text (to leave one out, use skip)"
                )
            return renamed
        for pattern, replacement in self._rules:
            fqn, count = pattern.subn(replacement, fqn)
            if count:
                self._used.add(pattern)
        return fqn

    def skips(self, fqn: str) -> bool:
        """Whether a skip pattern is found in a parameter's name."""
        found = [pattern for pattern in self._skip if pattern.search(fqn)]
        self._used.update(found)
        return bool(found)

    def sources(
        self,
        stored: Iterable[str],
        naming: FqnNaming = FqnNaming.PLAIN,
        *,
        known: Mapping[str, str] | None = None,
        prefixes: Sequence[str] = (),
    ) -> SourceNames:
        """Rename all that a checkpoint has.

        Args:
            stored: Its flat keys.
            naming: Where the names are in them.
            known: Names that have been placed already, from checkpoint to state: those of the model, when its
                optimizer is loaded.
            prefixes: For `FqnNaming.PLAIN`: keys that begin with one of these name an optimizer's state behind it.
        """
        return SourceNames(self, stored, naming, known or {}, tuple(prefixes))


class SourceNames:
    """A checkpoint's names, as the state would have them.

    Attributes:
        by_new: Name that the rules make, to the stored names they make it of; skipped ones are left out.
    """

    def __init__(
        self,
        renaming: Renaming,
        stored: Iterable[str],
        naming: FqnNaming,
        known: Mapping[str, str],
        prefixes: tuple[str, ...],
    ) -> None:
        self._renaming = renaming
        self._naming = naming
        self._known = known
        self._back = {new: old for old, new in known.items()}
        self._prefixes = prefixes
        self._stored: dict[str, None] = dict.fromkeys(stored)
        self._skipped: list[str] = []
        self.by_new: dict[str, list[str]] = {}
        for name in self._stored:
            head, fqn, tail = self._split(name)
            new = known.get(fqn)
            if new is None:
                new = renaming.apply(fqn)
            if renaming.skips(fqn) or renaming.skips(new):
                self._skipped.append(name)
            else:
                self.by_new.setdefault(head + new + tail, []).append(name)

    def place(self, wanted: Iterable[str]) -> Placement:
        """Find what goes to each place of the state. Those without an entry are left out.

        Raises:
            KeyMismatchError: Two entries go to one place.
        """
        sources: dict[str, str] = {}
        skipped_wanted: list[str] = []
        fqns: dict[str, str] = {}
        clashes: dict[str, list[str]] = {}
        skipped = set(self._skipped)
        for name in wanted:
            head, fqn, tail = self._split(name)
            if self._renaming.skips(fqn):
                skipped_wanted.append(name)
                continue
            found = self.by_new.get(name, ())
            if len(found) > 1:
                clashes[name] = list(found)
                continue
            source = found[0] if found else self._look_back(head, fqn, tail)
            if source is None:
                continue
            if source in skipped:
                skipped_wanted.append(name)
                continue
            sources[name] = source
            old = self._split(source)[1]
            if old != fqn:
                fqns[old] = fqn
        if clashes:
            raise _clash_error(clashes)
        return Placement(sources, tuple(skipped_wanted), tuple(self._skipped), fqns)

    def _look_back(self, head: str, fqn: str, tail: str) -> str | None:
        """The stored name that the rules make of the state's own, or None."""
        old = self._back.get(fqn)
        if old is None:
            old = self._renaming.apply(fqn)
        name = head + old + tail
        return name if name in self._stored else None

    def _split(self, name: str) -> tuple[str, str, str]:
        """What stands before and after a parameter's name in a flat key."""
        if self._naming is FqnNaming.OPTIMIZER:
            return _split_optimizer_name(name)
        for prefix in self._prefixes:
            if name.startswith(prefix):
                head, fqn, tail = _split_optimizer_name(name[len(prefix) :])
                return prefix + head, fqn, tail
        return "", name, ""


def optimizer_fqns(names: Iterable[str]) -> list[str]:
    """The parameters that an optimizer's flat keys name, each once."""
    splits = (_OPTIMIZER_NAME.fullmatch(name) for name in names)
    return list(dict.fromkeys(match[2] for match in splits if match is not None))


def find_optimizer_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """Prefixes below which a checkpoint of several states keeps optimizer state: ``""`` or ``"optim."``.

    Such is a group of keys that all begin with ``state.`` or ``param_groups.``, with some of the latter.
    """
    names = list(names)
    groups: dict[str, list[str]] = {"": names}
    for name in names:
        first, dot, rest = name.partition(".")
        if dot:
            groups.setdefault(f"{first}.", []).append(rest)
    prefixes = []
    for prefix, rests in groups.items():
        of_groups = sum(rest.startswith("param_groups.") for rest in rests)
        if of_groups and of_groups + sum(rest.startswith("state.") for rest in rests) == len(rests):
            prefixes.append(prefix)
    return ("",) if "" in prefixes else tuple(prefixes)


def _split_optimizer_name(name: str) -> tuple[str, str, str]:
    match = _OPTIMIZER_NAME.fullmatch(name)
    return ("", name, "") if match is None else (match[1], match[2], match[3])


def _compile(pattern: str, what: str) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise ConfigError(f"a {what} pattern is a {type(pattern).__name__}: give a regular expression as text")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"the {what} pattern {pattern!r} is no regular expression: {error}") from error


def _check_template(pattern: str, replacement: str) -> str:
    """The replacement, when it fits the pattern: found now and not at the first name that matches."""
    if not isinstance(replacement, str):
        raise ConfigError(f"rename replaces {pattern!r} by a {type(replacement).__name__}: give a text")
    groups = re.compile(pattern).groups
    try:
        # An alternative that matches nothing, with the same groups: the replacement is parsed and its groups checked.
        re.sub(f"(?:{pattern})|^", replacement, "", count=1)
    except (re.error, IndexError) as error:
        raise ConfigError(
            f"rename replaces {pattern!r}, which has {groups} groups, by {replacement!r}: {error}"
        ) from error
    return replacement


def _clash_error(clashes: Mapping[str, Sequence[str]]) -> KeyMismatchError:
    texts = {
        name: f"{' and '.join(repr(source) for source in found)} of the checkpoint both go there"
        for name, found in clashes.items()
    }
    shown = [f"{name!r}: {text}" for name, text in list(texts.items())[:10]]
    more = f" and {len(texts) - 10} more" if len(texts) > 10 else ""
    return KeyMismatchError(
        f"can't rename: one place has two sources ({'; '.join(shown)}{more}); nothing was read. Rename or skip one of "
        "them",
        mismatched=texts,
    )
