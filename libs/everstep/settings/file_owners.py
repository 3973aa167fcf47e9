"""Who may have written a file: you and root, or a stranger."""

import os
import stat
from pathlib import Path


def stranger_of(path: Path) -> str:
    """Who else may have written a file, in words; empty for none, or where nothing can be seen.

    As git asks of a repository: the file, a link to it and its folder belong to root or to you
    (behind `sudo` also to who called it), and others may not write there.
    """
    trusted = {0, os.geteuid()}
    caller = os.environ.get("SUDO_UID", "")  # noqa: TID251 - of this process, as its user is
    if os.geteuid() == 0 and caller.isdecimal():
        trusted.add(int(caller))
    try:
        looks = [(path.parent, path.parent.stat()), (path, path.lstat()), (path, path.stat())]
    except OSError:
        return ""  # reading it raises the error
    for seen, about in looks:
        if about.st_uid not in trusted:
            return f"{seen.absolute()} belongs to user {about.st_uid}"
        is_shared = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
        if about.st_mode & stat.S_IWOTH and not (is_shared or stat.S_ISLNK(about.st_mode)):
            return f"every user may write {seen.absolute()}"
    return ""
