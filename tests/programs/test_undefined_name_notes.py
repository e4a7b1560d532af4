"""The note that a worker adds to an error about a name that only the notebook has."""

from __future__ import annotations

import pytest

from nbelastic.programs.tracebacks import describe
from nbelastic.programs.undefined_names import explain_undefined_name


def raised_by(source, names):
    """The error that a cell raises in a worker with these names, as its user reads it."""
    try:
        exec(source, names)
    except NameError as error:
        explain_undefined_name(error, names)
        return describe(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("source", ["print(images)", "def train():\n    return images\ntrain()"])
def test_an_error_about_a_name_of_the_notebook_shows_how_to_send_it(source):
    """A cell uses what only the notebook has: the traceback ends with what sends it, or defines it on every worker."""
    text = raised_by(source, {}).splitlines()
    assert text[-2].startswith("NameError: name 'images' is not defined")
    assert "%elastic_push images" in text[-1]
    assert "%%elastic_setup" in text[-1]


@pytest.mark.parametrize(
    "source",
    [
        "def outer():\n    def inner():\n        return late\n    inner()\n    late = 1\nouter()",
        "def outer():\n    early\n    early = 1\nouter()",
        "import fractions\nexec('elsewhere', vars(fractions))",
    ],
)
def test_other_errors_about_names_have_no_such_note(source):
    """A name of a function, or of a module, is none of the notebook's."""
    assert "%elastic_push" not in raised_by(source, {})
