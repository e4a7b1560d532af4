"""Dicts and sets that never change: they equal plain ones, in the order in which their keys were added."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.core.persistent import PersistentDict, PersistentSet

KEYS = st.integers(0, 12)
CHANGES = st.lists(st.tuples(st.sampled_from("+-"), st.lists(KEYS, max_size=4)), max_size=30)


@given(st.lists(KEYS), CHANGES)
def test_it_equals_a_plain_dict(first, changes):
    """After any changes it has the keys and values of a plain dict, in the same order, and so have all earlier ones."""
    plain = dict.fromkeys(first, -1)
    shared = PersistentDict(plain)
    versions = [(shared, dict(plain))]
    for number, (what, keys) in enumerate(changes):
        if what == "+":
            plain |= dict.fromkeys(keys, number)
            shared = shared | dict.fromkeys(keys, number)
        else:
            plain = {key: value for key, value in plain.items() if key not in keys}
            shared = shared.without(keys)
        versions.append((shared, dict(plain)))
    for version, expected in versions:
        assert list(version) == list(expected)
        assert len(version) == len(expected)
        assert {key: version.get(key) for key in range(13)} == {key: expected.get(key) for key in range(13)}
        assert version == expected
        assert list(version.items()) == list(expected.items())
        assert list(reversed(version)) == list(reversed(expected))
        assert list(version) == list(expected)  # also after `items` has merged the changes


@given(st.lists(KEYS), CHANGES)
def test_it_equals_a_plain_set(first, changes):
    """After any changes it has the members of a plain set, in the order in which they were added."""
    plain, shared = dict.fromkeys(first), PersistentSet(first)
    for what, keys in changes:
        plain = plain | dict.fromkeys(keys) if what == "+" else {key: None for key in plain if key not in keys}
        shared = shared | keys if what == "+" else shared - keys
        assert list(shared) == list(plain)
        assert shared == plain.keys()
        assert shared & keys == shared & iter(keys) == plain.keys() & set(keys)
        assert [key in shared for key in range(13)] == [key in plain for key in range(13)]
        assert shared.isdisjoint(keys) == plain.keys().isdisjoint(keys)
        assert frozenset(keys) - shared == set(keys) - plain.keys()
        assert frozenset(keys) | shared == set(keys) | plain.keys()
        assert (shared <= frozenset(keys), shared >= frozenset(keys)) == (
            plain.keys() <= set(keys),
            plain.keys() >= set(keys),
        )
    assert hash(shared) == hash(PersistentSet(reversed(list(plain))))


def test_a_removed_key_is_not_there():
    """Reading a key that was removed is a KeyError."""
    numbers = PersistentDict({n: n for n in range(100)}).without([7])
    with pytest.raises(KeyError, match="7"):
        numbers[7]
    assert 7 not in numbers


def test_a_key_is_found_wherever_it_is():
    """In the base, among the changes, or nowhere: None."""
    numbers = PersistentDict({n: n for n in range(100)}).without([7]) | {8: -8, 100: 100}
    assert [numbers.find(key) for key in (6, 7, 8, 100, 101)] == [6, None, -8, 100, None]
    assert PersistentDict({1: 2}).find(1) == 2


def test_each_copy_is_small():
    """A cluster of 10,000 workers has many of them: none has a dictionary of attributes."""
    for shared in (PersistentDict({}), PersistentSet()):
        with pytest.raises(AttributeError):
            shared.another = 1
