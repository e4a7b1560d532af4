"""Plain English: words and patterns that these pages and this code do not use, and sentences that are too long.

`python -m tests.docs.plain_english FILES` prints each fault with its line.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

MOST_WORDS = 25  # in a sentence
WORDS_OF_A_TEXT = 3  # spaces after words from which a string literal is a sentence
MOST_STATEMENTS = 2  # of a string literal that is a sentence and parses as Python all the same
BANNED = {  # pattern: what to write instead
    r"strikes?|strik(?:es|ing) against": "failure",
    r"pardon(?:s|ed)?|forgiv(?:es?|en)": "clear",
    r"cools|cooling": "is in back-off",
    r"ghosts?": "stale worker",
    r"guests?": "external node, newcomer",
    r"heed(?:s|ed)?": "handle",
    r"owe[sd]?": "track",
    r"bur(?:y|ied|ies)": "forget",
    r"calm(?:ed|s|ly)?": "clear, healthy",
    r"whoever|whosoever": "name the actor",
    r"nobody|somebody|everybody": "name the actor: no member, a client, all ranks",
    r"for ever": "without end, until it is stopped",
    r"hither|thither|hence|thereby|therein|whereupon|wherein": "a plain clause",
    r"what is left": "name it",
    r"says? nothing": "has no effect; prints nothing",
    r"hears?|heard(?! from)": "receive",
    r"told|tells": "send, report, X asks Y to",
    r"(?<!there )(?:is|are) no (?!longer\b|more\b)\w+": "is not a ...",
    r"an? \w+ an? (?:host|slot|worker|rank|node|member|step|kernel|line|job)": "one ... per ...",
    r"its kin|their kin": "name them",
    r"of (?:its|his|their) own (?:accord|will)": "by itself",
    r"in (?:its|their) turn": "then",
    r"lest|ere|nigh|aught|naught|betimes": "a plain word",
}
RIDDLE = re.compile(
    r"(?:^|[.:;] )(?:Who|Whose|Those|What) (?:is|are|was|were|has|have|had|can|does|do|it|they|of)\b(?!.*\?)"
)
PATTERNS = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): instead for words, instead in BANNED.items()}
Prose = Iterator[tuple[int, str]]  # the line on which it begins, and the text


def prose_of(path: Path) -> Prose:
    """The prose of a Markdown page, or the comments and docstrings of a Python file."""
    return prose_of_page(path.read_text()) if path.suffix == ".md" else prose_of_code(path.read_text())


def prose_of_page(text: str) -> Prose:
    """Paragraphs, list items and table cells, without code."""
    text = re.sub(r"^(```|~~~).*?^\1", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    paragraph: list[str] = []
    begun = 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_row, is_item = line.startswith("|"), bool(re.match(r"\s*(?:[-*]|\d+\.) |#", line))
        if paragraph and (is_row or is_item or not line.strip()):
            yield begun, " ".join(paragraph)
            paragraph = []
        if is_row:
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip("|")) if cell.strip(" -"))
        elif line.strip():
            begun = begun if paragraph else number
            paragraph.append(re.sub(r"^\s*(?:[-*]|\d+\.|#+|>) ", "", line).strip())


def prose_of_code(source: str) -> Prose:
    """Docstrings, paragraph by paragraph; comments, neighbours on full lines together; texts of at least four words."""
    nodes = list(ast.walk(ast.parse(source)))
    yield from texts_in(nodes)
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield from ((first.lineno + line - 1, text) for line, text in prose_of_page(first.value.value))
    lines: list[str] = []
    begun = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# ?(?:noqa|type:|mypy:|!)", token.string):
            continue
        text = re.sub(r"\s*# (?:noqa|type:).*", "", token.string.lstrip("# "))
        is_full_line = token.line.strip().startswith("#")
        if not (is_full_line and lines and token.start[0] == last + 1):
            if lines:
                yield begun, " ".join(lines)
            lines, begun = [], token.start[0]
        lines.append(text)
        last = token.start[0] if is_full_line else 0
    if lines:
        yield begun, " ".join(lines)


def texts_in(nodes: Sequence[ast.AST]) -> Prose:
    """What the code shows to people: string literals that are sentences, f-strings with their values as `CODE`."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in nodes:
        match node:
            case ast.JoinedStr(values=values):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "CODE" for v in values)
            case ast.Constant(value=str(text)) if id(node) not in docstrings and id(node) not in parts:
                pass
            case _:
                continue
        if len(re.findall(r"[a-z]{2,}[,.:;]? ", text)) >= WORDS_OF_A_TEXT and not is_code(text):
            yield node.lineno, text


def is_code(text: str) -> bool:
    """Whether a string literal is code: a program in Python of several statements, or another language's by its signs."""
    if re.search(r"^(?:#!|import |from )|[{};]\s*\n", text):
        return True
    try:
        return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text))) > MOST_STATEMENTS
    except (SyntaxError, ValueError):
        return False


def plain(text: str) -> str:
    """The text without code, links' targets and quotations."""
    text = re.sub(r"``.*?``|`[^`]*`", "CODE", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"\"[^\"]*\"|“[^”]*”", "QUOTE", text)


def sentences(text: str) -> list[str]:
    """Split plain text where a sentence ends, or a colon or semicolon begins another clause."""
    return [part for part in re.split(r"(?<=[.!?:;])\s+", text) if part]


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """The line and a description of each fault in this file."""
    for line, prose in prose_of(path):
        text = plain(prose)
        for pattern, instead in PATTERNS.items():
            for found in pattern.finditer(text):
                yield line, f"“{found[0]}”: write {instead}"
        for riddle in RIDDLE.finditer(text):
            yield line, f"“{riddle[0].strip(' .:;')}” as a subject: begin with a noun"
        for sentence in sentences(text):
            words = len(re.findall(r"[\w'’`-]+", sentence))
            if words > MOST_WORDS:
                yield line, f"{words} words in a sentence, at most {MOST_WORDS}: “{sentence[:60]} …”"


if __name__ == "__main__":
    found = [(name, *fault) for name in sys.argv[1:] for fault in faults(Path(name))]
    for name, line, text in found:
        print(f"{name}:{line}: {text}")
    sys.exit(bool(found))
