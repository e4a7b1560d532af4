"""The fakes that tests of the notebook use have the names, parameters and defaults of what they stand for."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

import nbelastic as nbe

sys.path.insert(0, str(Path(__file__).parent))
from fake_cluster import FakeCluster, FakeJob

ONLY_FAKE = {"tell", "record", "run_for_show"}  # what tests do to a fake


def methods(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


@pytest.mark.parametrize(("fake", "real"), [(FakeCluster, nbe.Cluster), (FakeJob, nbe.Job)])
def test_a_fake_takes_what_the_real_one_takes(fake, real):
    """Each parameter that a fake names exists, with the same default and the same way to pass it."""
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
