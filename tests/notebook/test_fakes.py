"""The fakes in tests of the notebook have the names, parameters and defaults of the real classes."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

import nbelastic as nbe

sys.path.insert(0, str(Path(__file__).parent))
from fake_cluster import FakeCluster, FakeJob

ONLY_FAKE = {"update", "record", "run_for_show"}  # methods for tests


def methods(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


@pytest.mark.parametrize(("fake", "real"), [(FakeCluster, nbe.Cluster), (FakeJob, nbe.Job)])
def test_a_fake_has_the_parameters_of_the_real_class(fake, real):
    """Each parameter of a fake exists in the real class, with the same default and kind."""
    differ = []
    for name, signature in methods(fake).items():
        if name in ONLY_FAKE:
            continue
        expected = inspect.signature(getattr(real, name)).parameters
        for parameter in signature.parameters.values():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            there = expected.get(parameter.name)
            if there is None or (there.default, there.kind) != (parameter.default, parameter.kind):
                differ.append(f"{name}: {parameter} is {there} in {real.__name__}")
    assert differ == []
