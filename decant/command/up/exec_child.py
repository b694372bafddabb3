"""Replaces itself by a program that is killed when its parent ends.

    python exec_child.py PARENT CORES NICENESS PROGRAM ARGUMENTS...

PARENT is a process id; CORES "0,1", or "" for all, is ignored on platforms without CPU affinity; NICENESS is added to
that of this process. Imports only the standard library, to start fast.
"""

import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_WATCH_S = 0.5


def main(parent: int, cores: str, niceness: int, command: list[str]) -> None:
    end_with(parent)
    if os.getppid() != parent:  # it ended before it could be watched
        sys.exit(f"{parent} has ended")
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    os.nice(niceness)
    os.execv(command[0], command)


def end_with(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        watch(parent)
    elif libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def watch(parent: int) -> None:
    """Fork a process that kills this one within `_WATCH_S` of the end of `parent`, and ends with this one. It polls:
    platforms without prctl have no common event for that.
    """
    watched = os.getpid()
    if os.fork():
        return
    try:
        for stream in (0, 1, 2):  # `parent` reads the program's output to its end
            os.close(stream)
        while os.getppid() == watched:
            if not _exists(parent):
                os.kill(watched, signal.SIGKILL)
            time.sleep(_WATCH_S)
    finally:
        os._exit(0)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
