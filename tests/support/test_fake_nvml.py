"""The fake NVML is for the agents of clusters that are made with it, and for no other process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.nccl_double import FAKE_NVML

CODE = "import tests.support.nccl_double, pynvml; print(pynvml.__file__, pynvml.nvmlInit.__module__)"


@pytest.mark.parametrize("is_wanted", [True, False])
def test_only_a_process_with_the_variable_gets_the_fake(tmp_path, is_wanted):
    """A process that imports the double of NCCL goes on using the real NVML, unless it has the variable."""
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): pass")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    env.pop("FAKE_NVML", None)
    if is_wanted:
        env["FAKE_NVML"] = "gpus.json"
    out = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True, timeout=100)
    assert out.stdout.split() == [str((FAKE_NVML if is_wanted else tmp_path) / "pynvml.py"), "pynvml"]


def test_without_the_real_one_there_is_none(tmp_path):
    """On a machine without NVML's Python module, a process without the variable finds none."""
    code = f"import sys; sys.path[:] = [{str(FAKE_NVML)!r}, *sys.path[1:]]; import pynvml"
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert "ModuleNotFoundError: No module named 'pynvml'" in done.stderr
