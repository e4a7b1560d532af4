"""The names that a function reads in each of its calls, found from its source."""

from __future__ import annotations

import ast
import builtins
import linecache
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from types import CodeType

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While

EXITS = frozenset({"exit", "quit", "_exit", "abort"})


def certain_reads(code: CodeType) -> set[str]:
    """The names of other scopes that each call reads, if no error ends it and each loop runs at least once.

    Empty without source, as for a lambda. A name that is also set anywhere in the function is left out: its scope is unclear.
    """
    function = _source_of(code)
    if function is None:
        return set()
    bound = Counter(_bound_names(function))
    return _function(function, bound) - bound.keys()


def called_names(code: CodeType) -> set[str]:
    """The names of what the function, or a function inside it, calls. Other names may be passed on and never be called."""
    function = _source_of(code)
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)] if function is not None else []
    return {called.id for called in calls if isinstance(called, ast.Name)}


def _source_of(code: CodeType) -> Function | None:
    linecache.checkcache(code.co_filename)
    return _functions_in("".join(linecache.getlines(code.co_filename))).get((code.co_name, code.co_firstlineno))


@lru_cache(maxsize=256)
def _functions_in(text: str) -> dict[tuple[str, int], Function]:
    """The functions of a file or cell, by name and first line. Empty if it is not Python, or has too many levels."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Python has shown them to the user
            nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {(node.name, _line(node)): node for node in nodes if isinstance(node, Function)}


def _line(function: Function) -> int:
    return min(node.lineno for node in (function, *function.decorator_list))


def _bound_names(function: Function) -> Iterator[str]:
    """The names that the function, or code inside it, sets: once for each place."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif node is not function and not isinstance(node, ast.keyword):
            values = [getattr(node, field, None) for field in ("name", "asname", "arg", "rest")]
            yield from (value.split(".")[0] for value in values if isinstance(value, str))


def _function(function: Function, bound: Counter[str]) -> set[str]:
    """Names that its body reads, and the functions in it whose own names are read."""
    names = _block(function.body)
    inner = {one.name: one for one in _functions_inside(function) if bound[one.name] == 1}
    while used := sorted(names & inner.keys()):
        names |= _function(inner.pop(used[0]), bound)
    return names


def _functions_inside(node: ast.AST) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child
        elif not isinstance(child, ast.ClassDef):
            yield from _functions_inside(child)


def _block(statements: Sequence[ast.stmt]) -> set[str]:
    """The names that are read before the block ends, or is left."""
    names: set[str] = set()
    for number, one in enumerate(statements, 1):
        if any(_ways_out([one])):
            if not isinstance(one, ast.If):
                return names | _statement(one)
            rest = statements[number:]
            yes, no = (branch if any(_ways_out(branch)) else [*branch, *rest] for branch in (one.body, one.orelse))
            return names | _expressions(one.test) | (_block(yes) & _block(no))
        names |= _statement(one)
    return names


def _ways_out(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The places from which the statement after these nodes is not reached."""
    for node in nodes:
        match node:
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                yield node
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in EXITS:
                yield node
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                pass
            case ast.For() | ast.AsyncFor() | ast.While():
                inside = list(_ways_out(node.body))
                yield from (way for way in inside if not isinstance(way, ast.Break | ast.Continue))
                yield from _ways_out(node.orelse)
                if _is_endless(node) and not any(isinstance(way, ast.Break) for way in inside):
                    yield node
            case _:
                yield from _ways_out(ast.iter_child_nodes(node))


def _is_endless(loop: Loop) -> bool:
    return isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and bool(loop.test.value)


def _statement(node: ast.stmt) -> set[str]:
    match node:
        case ast.If():
            return _expressions(node.test) | (_block(node.body) & _block(node.orelse))
        case ast.For() | ast.AsyncFor():
            return _expressions(node.iter) | _block(node.body)
        case ast.While(body=[ast.If(orelse=[ast.Break()]) as turn]) if _is_endless(node):
            return _while(turn)
        case ast.While():
            return _while(node)
        case ast.With() | ast.AsyncWith():
            names = _expressions(*(item.context_expr for item in node.items))
            hides = any("suppress" in ast.dump(item) for item in node.items)
            return names if hides else names | _block(node.body)
        case ast.Try() | ast.TryStar():
            body = _first_call(node.body[0]) if node.handlers else _block(node.body)  # an error may end it early
            caught = any(_catches_name_errors(handler) for handler in node.handlers)
            return _block(node.finalbody) | (set() if caught else body)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return _expressions(*node.decorator_list, *node.args.defaults, *node.args.kw_defaults)
        case ast.ClassDef():
            return _expressions(*node.decorator_list, *node.bases, *node.keywords) | _block(node.body)
        case ast.Match(subject=first) | ast.Assert(test=first) | ast.AnnAssign(value=first):
            return _expressions(first)
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Return() | ast.Raise():
            return _expressions(*ast.iter_child_nodes(node))
    return set()


def _first_call(node: ast.stmt) -> set[str]:
    """The name of the function that a statement calls, as in `x = load(path)`."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))) | ast.Assign(value=ast.Call(func=ast.Name(id=name))):
            return {name}
    return set()


def _while(loop: ast.While | ast.If) -> set[str]:
    """A test of a plain variable, or of several values, is taken for a condition, as that of an `if`."""
    test = loop.test.operand if isinstance(loop.test, ast.UnaryOp) else loop.test
    is_condition = isinstance(test, ast.Name | ast.Attribute | ast.BoolOp | ast.IfExp)
    return _expressions(loop.test) | (set() if is_condition else _block(loop.body))


def _catches_name_errors(handler: ast.ExceptHandler) -> bool:
    """Also if it is not known: then the handler names something else than a built-in error."""
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    errors = [getattr(builtins, one.id, None) if isinstance(one, ast.Name) else None for one in types]
    return any(not isinstance(error, type) or issubclass(NameError, error) for error in errors)


def _expressions(*nodes: ast.AST | None) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name():
                names.add(node.id)
            case ast.BoolOp():
                names |= _expressions(node.values[0])
            case ast.IfExp():
                names |= _expressions(node.test) | (_expressions(node.body) & _expressions(node.orelse))
            case ast.Compare():
                names |= _expressions(node.left, node.comparators[0])
            case ast.Lambda():
                names |= _expressions(*node.args.defaults, *node.args.kw_defaults)
            case ast.GeneratorExp():  # the rest runs when it is asked for values
                names |= _expressions(node.generators[0].iter)
            case ast.ListComp() | ast.SetComp() | ast.DictComp():
                names |= _comprehension(node)
            case ast.AST():
                names |= _expressions(*ast.iter_child_nodes(node))
    return names


def _comprehension(node: ast.ListComp | ast.SetComp | ast.DictComp) -> set[str]:
    names: set[str] = set()
    for part in node.generators:
        names |= _expressions(part.iter, *part.ifs[:1])
        if part.ifs:
            return names
    return names | _expressions(*(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)))
