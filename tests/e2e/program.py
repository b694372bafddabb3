"""Run a program as ``python FILE`` in FOLDER does, in a fork: ``Forked("tests.e2e.program", [FILE, FOLDER])``."""

import os
import runpy
import sys

if __name__ == "__main__":
    file, folder = sys.argv[1:]
    os.chdir(folder)
    sys.argv = [file]
    runpy.run_path(file, run_name="__main__")
