"""A directory that appears whole, and replaces only what an earlier training wrote.

Everything is written into a hidden sibling, ``.NAME.xxxxxxxx.tmp``, made durable, and then gets
the target's name: by ``rename`` where nothing or an empty directory is, by ``renameat2`` with
``RENAME_EXCHANGE`` where an earlier output is. A killed run therefore leaves the target as it was
or as it should be. Where the filesystem cannot exchange, the old one steps aside under
``.NAME.xxxxxxxx.old`` first; a kill between the two renames leaves no target for the moment, and
the next run puts the old one back.

What is ours is said by ``offload_training.json`` in it, which also lists the files; when an old
output is deleted, exactly these go. Files that somebody else put there are kept aside, under a name
that the log tells.

A hidden sibling is locked (``flock``) as long as its writer lives. Unlocked ones are what killed
runs left, and are removed.

Permissions follow the umask, as an output is for whoever the user shares directories with. The
directory has them from its first byte on: an umask that hides the result hides it early, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from offload.errors import CheckpointError, OffloadError, StoreError
from offload.io.whole_file import check_temporary, temporary_of

log = logging.getLogger(__name__)

MARKER = "offload_training.json"
FORMAT = "offload training output"
VERSION = 1
_LONG_NAME = "model-00001-of-00001.safetensors"
"""As long as names of an output's files are."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Marker:
    """Who wrote a directory: the run, and the relative names of its files."""

    run: str
    files: tuple[str, ...]


def read_marker(directory: Path) -> Marker | None:
    """The marker in ``directory``; None where there is none that this program understands."""
    try:
        content = json.loads((directory / MARKER).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    run, files = content.get("run"), content.get("files")
    if content.get("version") != VERSION or not isinstance(run, str):
        return None
    if not isinstance(files, list) or not all(isinstance(f, str) and _inside(f) for f in files):
        return None
    return Marker(run, tuple(files))


def _inside(name: str) -> bool:
    return name != "" and not os.path.isabs(name) and ".." not in Path(name).parts


def check_target(target: Path, source: Path | None = None) -> str | None:
    """Refuse, before any work, what could not be written in the end.

    Returns the run id of the earlier output that will be replaced, None if there is none.

    Raises:
        OffloadError: ``target`` is something else than an absent or empty directory or an earlier
            output; is ``source``, the model that is trained; is a mount point; has a name that is
            too long while it is written.
        StoreError: its parent cannot be written.
    """
    real = target.expanduser().resolve()
    if source is not None and real == source.expanduser().resolve():
        raise OffloadError(
            f"{target} is the model that is trained; it is needed until the end: choose another "
            f"directory for the output"
        )
    if os.path.ismount(real):
        raise OffloadError(
            f"{target} is a mount point and cannot be replaced as a whole; choose a directory in it"
        )
    check_temporary(real, os.fspath(target), _LONG_NAME)
    parent = real.parent
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise StoreError(f"{target} cannot be made: {parent} is not a directory one can write to")
    if not os.path.lexists(real):
        return None
    if not real.is_dir():
        raise OffloadError(f"{target} is a file; choose another path for the output")
    marker = read_marker(real)
    if marker is not None:
        return marker.run
    try:
        present = sorted(p.name for p in real.iterdir())
    except OSError as e:
        raise StoreError(f"cannot look into {target}: {e.strerror}") from e
    if present:
        more = ", ..." if len(present) > 1 else ""
        raise OffloadError(
            f"{target} has other files in it ({present[0]}{more}) and is no output of an "
            f"earlier training, so it is not replaced; choose another directory, or empty it"
        )
    return None


@contextlib.contextmanager
def new_directory(
    target: Path, run_id: str, *, facts: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """A directory that becomes ``target`` when the block ends well, and vanishes otherwise.

    ``facts`` go into the marker beside the run id.

    Raises:
        OffloadError: as ``check_target``.
        StoreError: the disk refused.
    """
    check_target(target)
    real = target.expanduser().resolve()
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(real)
        partial, lock = make_locked(real)
    except OSError as e:
        raise StoreError(f"cannot write beside {target}: {e.strerror or e}") from e
    try:
        yield partial
        _write_marker(partial, run_id, facts or {})
        _sync_directories(partial)
        published = _publish(partial, real)
    except OSError as e:
        _clear(partial)
        raise StoreError(f"cannot write {target}: {e.strerror or e}") from e
    except BaseException:
        _clear(partial)
        raise
    finally:
        os.close(lock)
    if published != real:
        raise StoreError(
            f"{target} was filled by somebody else in the meantime; the output is complete and "
            f"lies in {published}"
        )


def write_durable(path: Path, data: bytes) -> None:
    """Write a new small file, down to the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def copy_durable(source: Path, path: Path) -> None:
    """Copy a file's content, not its permissions, down to the disk; folders are made.

    Raises:
        CheckpointError: ``source`` cannot be read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        try:
            opened = source.open("rb")
        except OSError as e:
            raise CheckpointError(f"cannot read {source}: {e.strerror}") from e
        with opened:
            shutil.copyfileobj(opened, file)
        file.flush()
        os.fsync(file.fileno())


def remove_leftovers(target: Path) -> None:
    """Clear away what killed runs for ``target`` left beside it.

    Temporaries whose writer lives are locked and stay. An old output that had stepped aside when
    its run was killed is put back if nothing took its place.
    """
    ours = re.compile(r"\." + re.escape(target.name) + r"\.[0-9a-f]{8}\.(tmp|old)")
    for entry in sorted(target.parent.iterdir()):
        found = ours.fullmatch(entry.name)
        if found is None or entry.is_symlink():
            continue
        with _try_lock(entry) as mine:
            if not mine:
                continue
            if found.group(1) == "old" and not os.path.lexists(target):
                log.warning("putting %s back, which a killed run had moved to %s", target, entry)
                os.rename(entry, target)
            else:
                log.info("removing %s, left by a run that was killed", entry)
                _discard(entry)


@contextlib.contextmanager
def _try_lock(directory: Path) -> Iterator[bool]:
    """Whether nobody else holds ``directory``, which is then held."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as e:
        log.debug("leaving %s alone: %s", directory, e)
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            log.debug("%s may belong to a run in progress: %s", directory, e)
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def make_locked(target: Path) -> tuple[Path, int]:
    """A new hidden sibling of ``target`` and the descriptor that locks it."""
    while True:
        partial = temporary_of(target)
        os.mkdir(partial)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as e:
            # A filesystem without locks: nobody gets one, so nobody removes this directory.
            log.debug("no lock on %s: %s", partial, e)
        # Between mkdir and flock another run may have taken it for a leftover.
        if partial.is_dir() and os.path.samestat(os.fstat(lock), os.stat(partial)):
            return partial, lock
        os.close(lock)


def _write_marker(directory: Path, run_id: str, facts: Mapping[str, str]) -> None:
    files = [str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir()]
    content = {
        "format": FORMAT,
        "version": VERSION,
        "run": run_id,
        "about": dict(facts),
        "files": sorted(files),
    }
    write_durable(directory / MARKER, (json.dumps(content, indent=2) + "\n").encode())


def _sync_directories(root: Path) -> None:
    for directory, _, _ in os.walk(root):
        _sync(Path(directory))


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(partial: Path, target: Path) -> Path:
    """Give ``partial`` its name; returns the name it got. Looked at again: writing took a while."""
    old: Path | None = None
    if target.is_dir() and read_marker(target) is not None:
        if exchange(partial, target):
            old = partial
        else:
            old = partial.with_suffix(".old")
            with _try_lock(target):  # or another run could take it for a leftover in between
                os.rename(target, old)
                try:
                    os.rename(partial, target)
                except BaseException:
                    os.rename(old, target)
                    raise
    else:
        try:
            os.rename(partial, target)  # also onto an empty directory; onto nothing else
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            # Days of training: rather under another name than not at all.
            target = target.with_name(f"{target.name}-{secrets.token_hex(4)}")
            os.rename(partial, target)
    _sync(target.parent)
    if old is not None:
        _clear(old)
    return target


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the filesystem cannot."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        return False
    paths = (os.fsencode(one), os.fsencode(other))
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        log.debug("no exchange of names in %s: %s", one.parent, os.strerror(code))
        return False
    raise OSError(code, os.strerror(code), str(one))


def _clear(directory: Path) -> None:
    """``_discard`` where something else is to be told or done: what cannot be deleted stays."""
    try:
        if os.path.lexists(directory):
            _discard(directory)
    except OSError as e:
        log.warning("%s could not be removed (%s); delete it", directory, e)


def _discard(directory: Path) -> None:
    """Delete an output or an unfinished one, but no file that we did not write."""
    marker = read_marker(directory)
    if marker is None:
        shutil.rmtree(directory)  # unfinished, so nobody else ever knew its name
        return
    for name in marker.files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(directory / name)
    rest = [p for p in directory.rglob("*") if not p.is_dir() and p != directory / MARKER]
    if rest:
        # Renamed while the marker is still there: without it, it would count as unfinished.
        kept = directory.with_name(directory.name.rpartition(".")[0].removeprefix(".") + ".kept")
        os.rename(directory, kept)
        os.unlink(kept / MARKER)
        log.warning(
            "%s has the %d files of the replaced directory that training did not write",
            kept,
            len(rest),
        )
    else:
        shutil.rmtree(directory)
