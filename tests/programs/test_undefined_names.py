"""Names that a notebook's function uses and that nothing defines."""

from __future__ import annotations

import functools
import inspect
import linecache

import pytest

from nbelastic.client.needed_names import needed_names
from nbelastic.programs.undefined_names import refuse_undefined_names
from tests.process.programs import notebook_names

NOTEBOOK = """
import contextlib, functools, sys
known, HAS = 1, False

def helper():
    return deeper

def uses_helper():
    return helper() + known

def inside():
    def inner():
        return [unknown for _ in range(3)]
    return inner

def guarded():
    try:
        return perhaps
    except NameError:
        return len("")

def asks():
    if "perhaps" in globals():
        return perhaps

def setter():
    global later
    later = 1

def uses_setter():
    setter()
    return later

def optional(has_tracker):
    if has_tracker:
        tracker.log(1)
    else:
        other.log(1)
    return known if has_tracker else default

def returns_early(has_tracker):
    if not has_tracker:
        return None
    return tracker.finish()

def skips(data, has_tracker):
    for batch in data:
        if has_tracker:
            tracker.log(batch)
            continue
        print(batch)
    while has_tracker and tracker.flush():
        tracker.wait()

def never_returns(has_tracker):
    if has_tracker:
        tracker.log(1)
    raise ValueError

def runs_for_ever(has_tracker):
    while True:
        if has_tracker:
            tracker.log(1)

def loops(more):
    while more():
        train_step()

def loops_over(data, lock):
    for batch in data:
        for part in batch:
            with lock:
                train_step()
    return 1

def loops_from_the_top(more):  # as Python 3.14 compiles `while more()`
    while True:
        if more():
            train_step()
        else:
            break

def on_both_sides(fast):
    if fast:
        return train_step()
    return [train_step()]

def tries(path):
    try:
        train_step()
    except OSError:
        return 0
    return 1

def ends_with_an_error():
    train_step()
    raise ValueError

def in_a_loop_under_if():
    if HAS:
        while True:
            wandb.log(1)
            if known():
                break
    return 1

async def waits_under_if():
    if HAS:
        while True:
            await wandb.log(1)
            if await known():
                break
    await known

def on_rank_0(rank):
    if rank == 0:
        while True:
            wandb.log(1)
    while True:
        print(rank)

def on_rank_0_with_break(rank):
    for _ in range(3):
        if rank == 0:
            while True:
                wandb.log(1)
                break
        print(rank)

def in_a_case(case):
    match case:
        case 1:
            while True:
                wandb.log(1)
        case _:
            return

def continues(more):
    while more():
        if not HAS:
            continue
        wandb.log(1)

def while_it_has():
    while HAS:
        wandb.log(1)

def exits(rank):
    if rank:
        sys.exit()
    wandb.log(1)

def log(value):
    wandb.log(value)

def maybe_logs():
    if HAS:
        log(1)

def maybe_sets():
    if known:
        setter()
    return later

def maybe_logs_inside():
    def log_inside():
        wandb.log(1)
    if HAS:
        log_inside()

def logs_with_either():
    def log_inside():
        wandb.log(1)
    if not HAS:
        log_inside = print
    log_inside()

def tries_all():
    try:
        wandb.log(1)
    except (OSError, Exception):
        pass

def tries_an_unknown_error(errors):
    try:
        wandb.log(1)
    except errors:
        pass

def tries_first(check):
    try:
        check()
        wandb.log(1)
    except ValueError:
        pass

def tries_else(check):
    try:
        check()
    except ValueError:
        pass
    else:
        wandb.log(1)

def suppresses():
    with contextlib.suppress(Exception):
        wandb.log(1)

def asserts():
    assert known, wandb.name

def filters():
    return [wandb.log(1) for _ in range(3) if HAS and known]

def makes_a_lambda():
    return lambda: wandb.log(1)

def makes_a_generator():
    return (wandb.log(1) for _ in range(3))

def chains(a, b):
    return a < b < wandb.step

def has_a_local_name():
    if HAS:
        wandb.log(1)
    return [wandb for wandb in range(3)]

is_a_lambda = lambda: wandb.log(1)

def after_a_loop(more):
    for _ in range(3):
        if more():
            break
    while True:
        if more():
            continue
        break
    return train_step()

async def awaits(more):
    async with more:
        async for part in more:
            print(f"{await train_step(part)}")

def in_parts(more):
    if more():
        pass
    elif 1 < train_step(step := more()) < (other or step):
        return
    return train_step()

def in_a_default(known):
    def inner(value=train_step()):
        return other

def chooses(kind):
    log = {"w": decorated, "p": print}[kind]
    return log

class Setup:
    def method(self):
        global of_a_method
        of_a_method = 1

def uses_a_method():
    Setup().method()
    return of_a_method

def sets_all():
    globals().update(settings())

def uses_all():
    sets_all()
    return of_all

class Odd:
    def __getattr__(self, name):
        raise KeyError(name)

odd = Odd()

def uses_odd():
    odd()
    return known

def reads_a_file(path):
    try:
        with open(path) as file:
            settings = yaml.load(file)
    except FileNotFoundError:
        settings = {}
    return settings

in_a_partial = functools.partial(in_parts, 1)

@functools.cache
def decorated():
    return missing
"""


@pytest.fixture
def notebook():
    """A notebook's namespace."""
    return notebook_names(NOTEBOOK)


def refuse(function):
    """What the notebook and then a worker do."""
    refuse_undefined_names(needed_names(function), getattr(inspect.unwrap(function), "__globals__", ()))


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        ("uses_helper", "'deeper' in helper()"),
        ("inside", "'unknown' in inside()"),
        ("decorated", "'missing' in decorated()"),
        *(
            (name, f"'train_step' in {name.replace('in_a_partial', 'in_parts')}()")
            for name in (
                *("loops", "loops_over", "loops_from_the_top"),
                *("on_both_sides", "tries", "ends_with_an_error"),
                *("after_a_loop", "awaits", "in_parts", "in_a_default", "in_a_partial"),
            )
        ),
    ],
)
def test_an_undefined_name_is_named_with_its_function(notebook, function, missing):
    """Also one that only a function inside, or another function, uses."""
    with pytest.raises(NameError, match="neither the notebook nor the workers define") as error:
        refuse(notebook[function])
    assert f": {missing}. Define" in str(error.value)


@pytest.mark.parametrize(
    "function",
    [
        *("guarded", "asks", "optional", "uses_setter", "setter"),
        *("chooses", "uses_a_method", "uses_all", "uses_odd", "reads_a_file"),
        *("returns_early", "skips", "never_returns", "runs_for_ever"),
        *("in_a_loop_under_if", "waits_under_if", "on_rank_0", "on_rank_0_with_break", "in_a_case"),
        *("continues", "while_it_has", "exits", "maybe_logs", "maybe_sets", "maybe_logs_inside", "logs_with_either"),
        *("tries_all", "tries_an_unknown_error", "tries_first", "tries_else", "suppresses", "asserts"),
        *("filters", "makes_a_lambda", "makes_a_generator", "chains", "has_a_local_name", "is_a_lambda"),
    ],
)
def test_a_name_that_may_be_missing_is_no_error(notebook, function):
    """One that is guarded against, is read under a condition only, or is set by another function."""
    refuse(notebook[function])


def test_functions_of_modules_are_not_searched(notebook):
    """Objects of other kinds are not searched, too."""
    for one in (functools.partial, print, NOTEBOOK, functools.wraps):
        refuse(one)


def test_a_function_without_source_is_not_refused(notebook):
    """The worker raises NameError when it comes to the name."""
    for source in ([], ["def uses_helper(:"], ["x"]):
        name = notebook["helper"].__code__.co_filename
        linecache.cache[name] = (0, None, source, name)
        refuse(notebook["uses_helper"])
