"""The builds of the CPU kernels, and which of them run here.

`DECANT_KERNELS=avx2 pytest ...` runs tests with that build; `python -m tests.kernel_builds` prints the builds that this
machine can run besides its default, and on standard error why not the others.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from decant.engine.cpu.kernels import loader as native

BUILDS = {"avx512": ("AVX512", "_kernels_avx512"), "avx2": ("AVX2", "_kernels"), "none": ("DEFAULT", "torch")}
"""torch's CPU capability, and the last word of ``decant.engine.cpu.kernels.loader.kind``; best first."""


def is_taken(build: str) -> bool:
    words = native.kind().split()
    return (words[1], words[-1]) == BUILDS[build]


def why_not(build: str) -> str:
    """Return why this machine can't run a build, or an empty string.

    If only this build is missing, the string is empty, so that its tests fail.
    """
    if build == "none":
        return ""
    if BUILDS[build][1] not in native.supported_modules():
        return "this CPU cannot run it"
    if not any(find_spec(f"decant.engine.cpu.kernels.{module}") for _, module in BUILDS.values()):
        return "not built, no C++ compiler was here"
    return ""


OTHERS = [build for build in BUILDS if not is_taken(build)]

if __name__ == "__main__":
    for build in OTHERS:
        if reason := why_not(build):
            print(f"not tested: the build {build}, {reason}", file=sys.stderr)
        else:
            print(build)
