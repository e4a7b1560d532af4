"""Which folders code may be imported from: no other account can put anything there, or replace a parent."""

from __future__ import annotations

import grp
import os
import pwd
from types import SimpleNamespace

import pytest

from nbelastic.errors import UsageError
from nbelastic.system import trusted_folders
from nbelastic.system.folder_paths import user_folder
from nbelastic.system.trusted_folders import why_untrusted

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")


@pytest.fixture
def own(tmp_path):
    """A folder of this user, in two others."""
    folder = tmp_path / "shared" / "cache" / "own"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_a_parent_that_all_users_can_write_to_is_refused(own, mode):
    """They could rename what is in it, also what another user owns."""
    shared = own.parents[1]
    shared.chmod(mode)
    assert why_untrusted(own) == (
        f"all users can write to {shared}, and could put other code there: `chmod +t {shared}`"
    )


def test_a_sticky_parent_is_trusted_if_the_folder_in_it_is_ones_own(own):
    """As /tmp: others cannot rename what is not theirs."""
    own.parents[1].chmod(0o1777)
    assert why_untrusted(own) == ""


@as_root
def test_a_folder_that_another_user_made_in_a_sticky_one_is_refused(own):
    """Its mode does not matter: it is its owner who can swap what is in it."""
    own.parents[1].chmod(0o1777)
    os.chown(own.parent, OTHER, OTHER)
    assert (
        why_untrusted(own)
        == f"{own.parent} belongs to another user ({pwd.getpwuid(OTHER).pw_name}), who could put other code there"
    )


def test_the_folder_itself_is_open_to_no_one_also_if_it_is_sticky(own):
    """In it, another user could make what this user has not made yet."""
    own.chmod(0o1777)
    assert why_untrusted(own).startswith(f"all users can write to {own}, ")


@as_root
def test_a_parent_that_a_group_can_write_to_is_refused(own):
    """As the folder of a project on a cluster of many users. The reason names the group."""
    shared = own.parents[1]
    os.chown(shared, -1, OTHER)
    shared.chmod(0o2775)
    group = grp.getgrgid(OTHER).gr_name
    assert why_untrusted(own) == (
        f"the group {group} can write to {shared}, and could put other code there: `chmod g-w {shared}`"
    )


@pytest.mark.parametrize(("members", "trusted"), [([], True), (["me"], True), (["me", "friend"], False)])
def test_the_users_own_group_may_write(own, monkeypatch, members, trusted):
    """Where each account has a group of its name, folders are made with mode 0775. An administrator may have added members."""
    gid = own.stat().st_gid
    me = SimpleNamespace(pw_name="me", pw_gid=gid)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="me", gr_gid=gid, gr_mem=members))
    own.chmod(0o775)
    assert (why_untrusted(own) == "") is trusted


def test_the_groups_bit_counts_where_an_access_list_names_users(own, monkeypatch):
    """The group's bit is then that of these users, even in the user's own group."""
    monkeypatch.setattr(trusted_folders, "_is_private_group", lambda gid: True)
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"list")
    own.chmod(0o775)
    assert "users of its access list (getfacl) can write to" in why_untrusted(own)


def test_a_link_in_the_path_is_no_folder(own, tmp_path):
    """Callers follow links first: one that appears afterwards is an attack."""
    (tmp_path / "link").symlink_to(own.parent)
    assert why_untrusted(tmp_path / "link" / "own") == f"{tmp_path / 'link'} is not a folder"


@as_root
def test_root_outside_a_container_is_trusted_but_not_in_a_sticky_folder(own, monkeypatch):
    """Without root's number in the container, its folders have the number of unknown owners, and so do those of others."""
    monkeypatch.setattr(trusted_folders, "_is_unmapped", lambda uid: uid == OTHER)
    os.chown(own.parent, OTHER, OTHER)
    assert why_untrusted(own) == ""
    own.parents[1].chmod(0o1777)
    assert "belongs to another user" in why_untrusted(own)


def test_in_a_pod_only_the_folder_itself_counts(own, monkeypatch):
    """Kubernetes makes volumes open to all users, of whom there are none in the pod."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    own.parents[1].chmod(0o777)
    assert why_untrusted(own) == ""
    own.chmod(0o777)
    assert why_untrusted(own)


def test_a_temporary_folder_that_others_can_write_to_is_refused(tmp_path, monkeypatch):
    """The user's modules, keys and programs are in it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    user_folder()
    tmp_path.chmod(0o777)
    with pytest.raises(
        UsageError, match=rf"^all users can write to {tmp_path}, .*, or set TMPDIR to another folder\.$"
    ):
        user_folder()


@as_root
def test_a_temporary_folder_of_a_group_is_accepted(tmp_path, monkeypatch):
    """Temporary folders of a project are often so. The strict rule is for shared caches from which code is imported."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    os.chown(tmp_path, os.getuid(), OTHER)
    tmp_path.chmod(0o2775)
    assert why_untrusted(user_folder())
    assert not why_untrusted(user_folder(), trust_groups=True)
