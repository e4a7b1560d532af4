"""What the Accelerate integration refuses of FSDP. `tests/process/test_sharded_frameworks.py` trains with it."""

import os
import warnings
from importlib import import_module

import pytest

from nbelastic import UsageError


@pytest.fixture(scope="module")
def integration():
    """Imported late, because Accelerate takes seconds; its warnings are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("accelerate")
        return import_module("nbelastic.integrations.accelerate_sharding")


def test_fsdp1_is_refused(integration, monkeypatch):
    """Also where the environment asks for it, as `accelerate launch` does."""
    with pytest.raises(UsageError, match=r"FullyShardedDataParallelPlugin\(fsdp_version=2"):
        integration.sharding_plugin(integration.FullyShardedDataParallelPlugin(fsdp_version=1))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(UsageError, match=r"FullyShardedDataParallelPlugin\(fsdp_version=2"):
        integration.sharding_plugin(None)


def test_parameters_on_the_cpu_of_a_gpu_are_refused(integration):
    with pytest.raises(UsageError, match="cpu_offload is not elastic: leave it out"):
        integration.sharding_plugin(integration.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True))


def test_fsdp2_is_taken_from_options_and_environment(integration, monkeypatch):
    plugin = integration.FullyShardedDataParallelPlugin(fsdp_version=2)
    assert integration.sharding_plugin(plugin) is plugin
    assert integration.sharding_plugin(None) is None
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert integration.sharding_plugin(None).fsdp_version == 2


@pytest.mark.parametrize("before", [None, "false"])
def test_a_later_program_of_this_worker_does_not_shard(integration, monkeypatch, before):
    """Accelerate sets a variable when it gets a plugin."""
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    if before is not None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", before)
    with integration.unchanged_environment():
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert os.environ.get("ACCELERATE_USE_FSDP") == before
