"""Which folders may be a cluster's `log_dir`."""

from __future__ import annotations

import os
import stat

import pytest

import nbelastic as nbe
from nbelastic.protocol.run_folder import RunFolder


def test_a_log_dir_of_another_user_is_refused(start_hostless, tmp_path, monkeypatch):
    """The error is one line that says what to do, and the start leaves neither a lock nor a run folder."""
    (tmp_path / "logs").mkdir()
    real = os.stat

    def of_another_user(path, **more):
        found = real(path, **more)
        is_it = str(path) == str(tmp_path / "logs")
        return os.stat_result((*found[:4], 12345, *found[5:10])) if is_it else found

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", of_another_user)
        with pytest.raises(nbe.UsageError) as refused:
            start_hostless()
    assert (
        str(refused.value)
        == f"log_dir={tmp_path}/logs belongs to another user: name a folder of your own, such as a new one in it."
    )
    assert list((tmp_path / f"nbelastic-{os.getuid()}" / "runs").iterdir()) == []


def test_a_log_dir_that_all_users_can_write_to_is_refused(start_hostless, tmp_path):
    """A new folder in it is private, so that one is accepted. So is a folder with the sticky bit."""
    folder = tmp_path / "logs"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(
        nbe.UsageError, match=r"^all users can write to log_dir=.*: run `chmod o-w`, or name a new folder"
    ):
        start_hostless()
    start_hostless("new", log_dir=folder / "new")
    assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o700
    folder.chmod(0o1777)
    start_hostless("sticky")


def test_a_log_dir_that_a_group_shares_is_accepted(start_hostless, tmp_path):
    """Project folders are often so. The files in it are private, also those that were open to others before."""
    folder = tmp_path / "logs"
    folder.mkdir()
    folder.chmod(0o2770)
    (folder / "events.jsonl").write_text("")
    (folder / "events.jsonl").chmod(0o666)
    start_hostless()
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("name", ["events.jsonl", "driver.log"])
def test_a_link_in_the_log_dir_is_not_followed(start_hostless, tmp_path, name):
    """The cluster does not start, and the file to which the link leads stays as it is."""
    (tmp_path / "mine").write_text("precious\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(nbe.UsageError, match=rf"log_dir: .*/{name} cannot be used \(it is a link.*\): name another"):
        start_hostless()
    assert (tmp_path / "mine").read_text() == "precious\n"
    assert not RunFolder("quiet").path.exists()


def test_a_log_dir_may_be_in_the_home_folder(clusters_folder, monkeypatch):
    """`~` is the home folder, as in other paths: a magic's line passes no shell. A client that attaches finds the same folder."""
    monkeypatch.setenv("HOME", "/home/me")
    configuration = nbe.Cluster(log_dir="~/logs")._link.configuration
    assert str(configuration.log_dir) == configuration.arguments["log_dir"] == "/home/me/logs"
