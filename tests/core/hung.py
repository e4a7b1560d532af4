"""A survivor of a break that an abort does not wake, and that alone holds the training state."""

from __future__ import annotations

from tests.core.story import Story

A, B, C = "a/0#1", "b/0#1", "c/0#1"


def survivor(*hosts: str, **limits) -> Story:
    """Two workers train up to commit 7; one is killed, and the other, on `a`, hangs in the broken collective."""
    limits = {"min": 2, "max": 2, "elastic_timeout": 100.0} | limits
    story = Story(*(hosts or ("a", "b")), **limits).run().commit(7)
    return story.stick(A).kill(B)


def nothing_lost(story: Story, commit: int = 7) -> bool:
    """Whether all members are at least at this commit."""
    return min(story.fakes[w].commit for w in story.cluster.members) >= commit
