"""The part of a cluster that is saved for the next driver."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core.cluster_snapshot import is_saved
from nbelastic.core.persistent import PersistentSet
from nbelastic.core.state import Stage
from tests.core.story import with_stage


def test_a_report_that_only_the_worker_repeats_needs_no_save():
    """The next driver gets it from the worker. A host that has left must be saved."""
    story = with_stage(Stage.FORMING)
    before = story.cluster
    fewer = replace(before, awaiting=PersistentSet(list(before.awaiting)[1:]))
    assert is_saved(before, before)
    assert is_saved(before, fewer)
    assert not is_saved(before, replace(fewer, removed_hosts=frozenset({"a"})))
