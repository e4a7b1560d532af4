"""Makes magics of methods: options, help text, tab completion, and errors of one line."""

from __future__ import annotations

import argparse
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, NamedTuple

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_cell_magic, line_magic
from IPython.core.magic_arguments import MagicArgumentParser

from nbelastic.client.notebook_line import show_in_one_line

Kind = Literal["line", "cell", "line_cell"]
Values = Mapping[str, Callable[[], Iterable[str]]]  # known values that Tab offers, by metavar

_DECORATORS: Mapping[Kind, Callable[[Any], Any]] = {
    "line": line_magic,
    "cell": cell_magic,
    "line_cell": line_cell_magic,
}
# The text before a comment: words, quotations, escaped characters, and a `#` within a word.
_BEFORE_COMMENT = re.compile(r"""(?:[^\s\\"'#]|\\.|"(?:[^"\\]|\\.)*"|'[^']*'|\s(?!\s*#)|(?<=\S)#)*""")
_LINE = re.compile(r"\s*(?:[\w\s,]+=\s*)?(?P<percent>%%?)(?P<name>\w+)\s(?P<rest>.*)")


class Argument(NamedTuple):
    """The arguments of one `add_argument` call, until the parser is created."""

    names: tuple[str, ...]
    settings: dict[str, Any]


def was_given(value: object) -> bool:
    """Whether this value of an option is not that of one that was left out. 0 is given."""
    return value is not None and value is not False


def argument(*names: str, **settings: Any) -> Argument:
    """Describe an argument as for `argparse`'s `add_argument`. Its metavar selects the known values that Tab offers."""
    return Argument(names, settings)


class Listed(argparse.Action):
    """Several values, with blanks or commas between them; an option may also be repeated. `each` converts one value."""

    def __init__(self, *args: Any, each: Callable[[str], Any] = str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._each = each

    def __call__(self, _: argparse.ArgumentParser, namespace: Namespace, values: Any, __: str | None = None) -> None:
        """Add the values to those of earlier options. ArgumentError for a wrong one, or if there is none."""
        words = [word for value in values for word in value.split(",") if word]
        if not words and self.default is None:
            raise argparse.ArgumentError(self, "expected at least one argument")
        for word in words:
            try:
                value = self._each(word)
            except ValueError:
                name = getattr(self._each, "__name__", "")
                raise argparse.ArgumentError(self, f"invalid {name} value: {word!r}") from None
            setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), value])


def several(*names: str, **settings: Any) -> Argument:
    """Describe an argument with several values: see `Listed`."""
    return Argument(names, {"action": Listed, "nargs": "*" if "default" in settings else "+", **settings})


def out(help: str) -> Argument:  # noqa: A002  (as for argparse)
    """The option `--out`: a variable that gets what the magic returns."""
    return argument("--out", dest="out_variable", metavar="VARIABLE", help=f"variable that gets {help}")


def magic(kind: Kind, *arguments: Argument) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Make a magic of a method `(self, options)`, or `(self, options, cell)` if there may be a cell. It has the method's name.

    Wrong options raise IPython's UsageError. Errors of nbelastic are shown as one line without a traceback.
    """

    def decorate(method: Callable[..., object]) -> Callable[..., object]:
        name = method.__name__
        parser = MagicArgumentParser(f"%{name}" if kind == "cell" else name, description=method.__doc__)
        for each in arguments:
            parser.add_argument(*each.names, **each.settings)

        @wraps(method)
        def run(self: object, line: str = "", cell: str | None = None) -> object:
            options = _parse(parser, name, line)
            try:
                return method(self, options) if kind == "line" else method(self, options, cell)
            except KeyboardInterrupt as error:
                show_in_one_line(error)
                raise

        run.__doc__ = parser.format_help()
        run.parser = parser  # type: ignore[attr-defined]  # completion reads it
        registered: Callable[..., object] = _DECORATORS[kind](run)
        return registered

    return decorate


def without_comment(line: str) -> str:
    """Return the line up to a `#` that begins a word, as a shell does. A `#` in quotation marks or within a word stays."""
    found = _BEFORE_COMMENT.match(line)
    end = found.end() if found else 0
    return line[:end] if line[end:].lstrip().startswith("#") else line


def words_of(line: str) -> list[str]:
    """Split a magic's line, without its comment, as a POSIX shell does: quotation marks group words and are removed.

    IPython's own `arg_split` leaves the marks in. UsageError for a mark that is not closed.
    """
    try:
        return shlex.split(without_comment(line))
    except ValueError as error:
        if "quotation" not in str(error):  # a backslash at the end
            raise UsageError("a backslash is the last character: remove it, or write two") from None
        raise UsageError("a quotation mark is not closed: close it, or write \\ before it") from None


def split_pair(flag: str, text: str) -> tuple[str, str]:
    """Split NAME=VALUE. UsageError for any other text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UsageError(f"{flag} {text}: write NAME=VALUE.")
    return name, value


def completion(parsers: Callable[[str, bool], argparse.ArgumentParser | None], known: Callable[[], Values]) -> Any:
    """Create a matcher for IPython's completer. `parsers(name, is_cell)` finds a magic's parser."""

    def match(context: CompletionContext) -> SimpleMatcherResult:
        line = _LINE.match(context.text_until_cursor)
        parser = parsers(line["name"], line["percent"] == "%%") if line else None
        word, completions = complete(parser, line["rest"], known()) if line and parser else ("", [])
        found = [SimpleCompletion(text=text, type="magic") for text in completions]
        return SimpleMatcherResult(completions=found, matched_fragment=word, suppress=bool(found))

    return context_matcher(priority=200, identifier="nbelastic")(match)


def complete(parser: argparse.ArgumentParser, text: str, offers: Values) -> tuple[str, list[str]]:
    """Return the word at the cursor and its completions. `text` is the line after the magic's name.

    Completions are options, or the known values of the option before the word. In `a,b` the word is `b`.
    """
    words = text.split()
    word = "" if text[-1:].isspace() or not words else words.pop()
    before = words[-1] if words else ""
    actions = parser._actions
    option = next((word for word in reversed(words) if word.startswith("-")), "")
    awaiting = [
        a
        for a in actions
        if (before in a.option_strings and a.nargs != 0) or (isinstance(a, Listed) and option in a.option_strings)
    ]
    known = [value for a in (awaiting or actions) if awaiting or not a.option_strings for value in _known(a, offers)]
    if not awaiting or before != option:
        known += [a.option_strings[-1] for a in actions if a.option_strings]
    *listed, word = word.split(",")
    return word, [value for value in known if value not in {*words, *listed} and value.startswith(word)]


def _known(action: argparse.Action, offers: Values) -> Iterable[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    known = offers.get(str(action.metavar))
    return known() if known else ()


def _parse(parser: MagicArgumentParser, name: str, line: str) -> Namespace:
    try:
        options: Namespace = parser.parse_args(words_of(line))
    except UsageError as error:
        text = str(error).rstrip(".")
        raise UsageError(f"{text}{_similar_option(parser, text)}; %{name}? shows the options.") from None
    return options


def _similar_option(parser: argparse.ArgumentParser, error: str) -> str:
    """A question about the option that was meant, if the error is about an unknown one."""
    unknown = re.match(r"unrecognized arguments: (--[\w-]+)", error)
    options = [option for action in parser._actions for option in action.option_strings]
    similar = get_close_matches(unknown[1], options, 1) if unknown else []
    return f" (did you mean {similar[0]}?)" if similar else ""
