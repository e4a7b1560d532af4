"""Folders from which code is imported: another account that could put files there could run code as this user.

So could one that could replace a parent. The rule is that of sshd's StrictModes, for the folder and each parent up to `/`.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from contextlib import suppress
from pathlib import Path

ACL = "system.posix_acl_access"


def why_untrusted(folder: Path, *, trust_groups: bool = False) -> str:
    """Which account other than this user and root could replace what is in `folder`, and what to do. Empty: none.

    `folder` is a path without links (`Path.resolve`). It must be this user's, and no one else may write to it. Each parent
    belongs to this user or root. A parent that others can write to must be sticky, as `/tmp` is: in it, others cannot rename
    a folder of this user. With `trust_groups` a group may write to the parents, as on project folders. In a pod, which has no
    other accounts, the parents are not checked: Kubernetes makes volumes open to all.
    """
    open_parent = False  # others can make folders in the parent
    for path in (*reversed(folder.parents), folder):
        found = path.lstat()
        is_last = path == folder
        if not is_last and "KUBERNETES_SERVICE_HOST" in os.environ:
            continue
        if not stat.S_ISDIR(found.st_mode):
            return f"{path} is not a folder"
        if not _is_owner_trusted(found.st_uid, is_in_open_parent=open_parent, is_last=is_last):
            return f"{path} belongs to another user ({_user(found.st_uid)}), who could put other code there"
        writers, change = _writers(path, found, trust_groups=trust_groups and not is_last)
        open_parent = bool(writers)
        if open_parent and (is_last or not found.st_mode & stat.S_ISVTX):
            if found.st_mode & stat.S_IWOTH and not is_last:
                change = "+t"  # other accounts may need a folder such as /tmp
            name = shlex.quote(str(path))
            return f"{writers} can write to {path}, and could put other code there: `chmod {change} {name}`"
    return ""


def _is_owner_trusted(uid: int, *, is_in_open_parent: bool, is_last: bool) -> bool:
    if uid == os.geteuid():
        return True
    if is_last:
        return False
    return uid == 0 or (_is_unmapped(uid) and not is_in_open_parent)


def _is_unmapped(uid: int) -> bool:
    """Whether this is the owner of files of accounts outside a container without root, as root is there."""
    with suppress(OSError, ValueError):
        if uid == int(Path("/proc/sys/kernel/overflowuid").read_text()):
            return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    return False


def _writers(path: Path, found: os.stat_result, *, trust_groups: bool) -> tuple[str, str]:
    """Who else can write to a folder, and the mode that changes it. Empty: no one."""
    if found.st_mode & stat.S_IWOTH:
        return "all users", "go-w"
    if trust_groups or not found.st_mode & stat.S_IWGRP:
        return "", ""
    with suppress(OSError):  # the group's bit is also that of users whom an access list names
        os.getxattr(path, ACL)
        return "users of its access list (getfacl)", "g-w"
    return ("", "") if _is_private_group(found.st_gid) else (f"the group {_group(found.st_gid)}", "g-w")


def _is_private_group(gid: int) -> bool:
    """Whether this user alone is in the group, as where each account has a group of its name. The group of root is, too."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    is_own = group.gr_gid == 0 or (group.gr_name == user.pw_name and group.gr_gid == user.pw_gid)
    return is_own and set(group.gr_mem) <= {user.pw_name, "root"}


def _user(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _group(gid: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)
