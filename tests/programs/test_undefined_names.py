"""Names that a notebook's function uses and that nothing defines."""

from __future__ import annotations

import functools

import pytest

from nbelastic.programs.undefined_names import refuse_undefined_names

NOTEBOOK = """
import functools
known = 1

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

@functools.cache
def decorated():
    return missing
"""


@pytest.fixture
def notebook():
    """A notebook's namespace."""
    names = {"__name__": "__main__"}
    exec(NOTEBOOK, names)
    return names


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        ("uses_helper", "'deeper' in helper()"),
        ("inside", "'unknown' in inside()"),
        ("decorated", "'missing' in decorated()"),
        *(
            (name, f"'train_step' in {name}()")
            for name in (
                *("loops", "loops_over", "loops_from_the_top"),
                *("on_both_sides", "tries", "ends_with_an_error"),
            )
        ),
    ],
)
def test_an_undefined_name_is_named_with_its_function(notebook, function, missing):
    """Also one that only a function inside, or another function, uses."""
    with pytest.raises(NameError, match="neither the notebook nor the workers define") as error:
        refuse_undefined_names(notebook[function])
    assert f": {missing}. Define" in str(error.value)


@pytest.mark.parametrize(
    "function",
    [
        *("guarded", "asks", "optional", "uses_setter", "setter"),
        *("returns_early", "skips", "never_returns", "runs_for_ever"),
    ],
)
def test_a_name_that_may_be_missing_is_no_error(notebook, function):
    """One that is guarded against, is read under a condition only, or is set by another function."""
    refuse_undefined_names(notebook[function])


def test_functions_of_modules_are_not_searched(notebook):
    """Objects of other kinds are not searched, too."""
    for one in (functools.partial, print, NOTEBOOK, functools.wraps):
        refuse_undefined_names(one)
