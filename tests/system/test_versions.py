"""Which versions of Python, nbelastic and torch may meet in one cluster."""

import pytest

from nbelastic.system import versions

HERE = {"Python": "3.11.2", "nbelastic": "0.1.0", "torch": "2.13.0+cu126"}


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (HERE, ""),
        (HERE | {"Python": "3.11.9"}, ""),  # the byte code is the same
        (HERE | {"torch": "2.13.0+cpu"}, ""),  # built otherwise, and the same
        (HERE | {"Python": "3.12.1"}, "Python 3.12.1 there, 3.11.2 here"),
        (HERE | {"torch": "2.11.0"}, "torch 2.11.0 there, 2.13.0+cu126 here"),
        (HERE | {"torch": ""}, "torch missing there, 2.13.0+cu126 here"),
        (
            HERE | {"Python": "3.12.1", "nbelastic": "0.2"},
            "Python 3.12.1 there, 3.11.2 here; nbelastic 0.2 there, 0.1.0 here",
        ),
        (
            {},
            "Python missing there, 3.11.2 here; nbelastic missing there, 0.1.0 here; torch missing there, 2.13.0+cu126 here",
        ),
    ],
)
def test_both_versions_are_named(there, said):
    """The text names each difference that matters, with both versions."""
    assert versions.difference(there, HERE) == said


def test_a_kernel_without_torch_accepts_any_torch():
    """The notebook's environment need not have torch."""
    assert versions.difference(HERE, HERE | {"torch": ""}) == ""


def test_the_installed_versions_are_found():
    """With the names that `difference` uses."""
    found = versions.installed()
    assert versions.difference(found, found) == ""
    assert all(found[name] for name in ("Python", "nbelastic", "torch"))


@pytest.mark.filterwarnings("ignore:Implicit None")  # of Python's own module
def test_the_remains_of_a_package_are_no_package(tmp_path, monkeypatch):
    """A folder without metadata, as an uninstall on NFS leaves it, hides no version and is none."""
    before = versions.installed()["torch"]
    (tmp_path / "torch-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert versions._installed.__wrapped__()["torch"] == before
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert versions._installed.__wrapped__()["torch"] == ""


def test_a_torch_that_was_not_tested_is_named():
    """One line names its version and those that were tested; a tested release gives no line."""
    assert versions.untested({"torch": "2.13.0+cu130"}) == versions.untested({}) == ""
    assert (
        versions.untested({"torch": "2.99.1"})
        == "torch 2.99.1: nbelastic was not tested with it, but with 2.11, 2.13, 2.14, 2.15"
    )


def test_packages_that_differ_between_hosts_are_named_once():
    """A package that only one of two hosts has in its environment is not named: the other's Python may have it."""
    packages = {"a": {"einops": "0.8.1", "timm": "1.0"}, "b": {"einops": "0.8.1"}, "c": {"einops": "0.8.2", "x": "1"}}
    assert versions.differing(packages, "b") == "einops 0.8.1 there, 0.8.2 on c"
    assert versions.differing(packages, "c") == "einops 0.8.2 there, 0.8.1 on a"
    assert versions.differing({"a": packages["a"], "b": packages["b"]}, "b") == ""
