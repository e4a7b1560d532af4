"""What a worker says of its place in the world."""

import pytest

import nbelastic as nbe
from nbelastic.worker import session
from nbelastic.worker.formation import Formation


def test_the_environment_is_that_of_torchrun(monkeypatch):
    """The third of five workers on three hosts: a host is a group, and the store is the master."""
    hosts = (("a", 2), ("b", 2), ("c", 1))
    here = Formation(4, 2, 5, 0, 2, 1, 3, "10.0.0.7:4711", 0, (), hosts)
    monkeypatch.setattr(session, "world", lambda: here)
    assert nbe.environment() == {
        "RANK": "2",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "5",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "4711",
    }


def test_there_is_no_environment_outside_a_world():
    with pytest.raises(nbe.NoWorldError):
        nbe.environment()
