"""The mutation test, which is run by hand, can be run."""

from tests import mutate


def test_equivalent_mutants_are_of_the_present_code():
    """Otherwise a change of the code is noticed only when the mutation test is to run."""
    assert mutate.outdated() == []
