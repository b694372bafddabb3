"""Becomes another program that does not outlive the process that started it.

    python lifeline.py PARENT CORES PROGRAM ARGUMENTS...

PARENT is that process's id, CORES "0,1" or "" for all. The kernel kills us when the parent ends, in whatever way;
the new program inherits that. Only the standard library is imported: this runs before every process's own start.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, cores: str, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before it could be watched
        sys.exit(f"{parent} has ended")
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
