"""Compile protos/*.proto, protos/{vllm,kserve}/*.proto and the C++ kernels during the build.

A wheel gets the stubs in its build folder, an editable install beside the sources. The compiler is a build step of its
own: in an editable install setuptools turns an error of a customised `build_py` into a warning.
"""

import os
import platform
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.errors import ExecError

PROTOS = Path("decant/protos")
FOLDERS = (PROTOS, PROTOS / "vllm", PROTOS / "kserve")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


OLDEST = {"protobuf": (6, 33, 0), "grpcio": (1, 71, 0)}
"""The runtimes that the stubs work with, also in pyproject.toml. grpcio-tools 1.71 to 1.85 write the same code but for
the version of their own release, which the stubs require when they are imported: the build writes these instead."""
_CHECKS = {
    "_pb2.py": (
        re.compile(r"(_runtime_version\.Domain\.PUBLIC,)\s+\d+,\s+\d+,\s+\d+,\s+'',"),
        r"\1 {}, {}, {}, '',".format(*OLDEST["protobuf"]),
    ),
    "_pb2_grpc.py": (
        re.compile(r"^GRPC_GENERATED_VERSION = '[\d.]+'$", re.MULTILINE),
        "GRPC_GENERATED_VERSION = '{}.{}.{}'".format(*OLDEST["grpcio"]),
    ),
}


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted(folder.glob("*.proto"))]


def include_paths() -> list[str]:
    """Import paths in order: our root, google/rpc (decant/protos/), google/protobuf (grpc_tools)."""
    bundled = find_spec("grpc_tools")
    if bundled is None:
        raise ExecError("compiling protos/ needs grpcio-tools")
    return [".", str(PROTOS), *(str(Path(where) / "_proto") for where in bundled.submodule_search_locations or ())]


def compile_proto(source: Path, out: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", *(f"-I{path}" for path in include_paths())]
    command += [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    done = subprocess.run([*command, source.as_posix()], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ExecError(f"protoc failed on {source.as_posix()}:\n{done.stderr.strip()}")
    for suffix, (check, oldest) in _CHECKS.items():
        stub = out / source.with_name(source.stem + suffix)
        text, count = check.subn(oldest, stub.read_text())
        if count != 1:
            raise ExecError(f"{stub.as_posix()}: one check of a version, got {count}")
        stub.write_text(text)


class CompileProtos(Command):
    """Build step of the stubs; setuptools sets `editable_mode` when they belong beside the sources."""

    description = "compile protos/*.proto to Python"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False
    build_lib: str

    def initialize_options(self) -> None:
        self.build_lib = ""

    def finalize_options(self) -> None:
        self.build_lib = self.get_finalized_command("build_py").build_lib

    def run(self) -> None:
        compiled = sources()
        if not compiled:
            raise ExecError("no protos/*.proto beside setup.py: the source tree is incomplete")
        out = Path(".") if self.editable_mode else Path(self.build_lib)
        for stale in (path for folder in FOLDERS for pattern in GENERATED for path in (out / folder).glob(pattern)):
            stale.unlink()
        os.makedirs(out, exist_ok=True)
        for source in compiled:
            compile_proto(source, out)

    def get_source_files(self) -> list[str]:
        return [path.as_posix() for path in sources()]

    def get_outputs(self) -> list[str]:
        return sorted(self.get_output_mapping())

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    # Last: `build_py` copies stubs that an editable install left beside the sources; these replace them.
    sub_commands: ClassVar = [*build.sub_commands, ("compile_protos", None)]


KERNELS = Path("decant/engine/cpu/kernels")
FLAGS = ("-std=c++17", "-O3", "-g0", "-mfma", "-mf16c", "-ffp-contract=off", "-fopenmp")
AVX512 = ("f", "bw", "dq", "vl", "vbmi", "vbmi2", "vnni", "bf16")
CPUS = {
    "_kernels": ("module.cpp", ("-mavx2",)),
    "_kernels_avx512": ("avx512.cpp", tuple(f"-mavx512{part}" for part in AVX512)),
}
"""Source and flags of each build."""


def extensions() -> list[Extension]:
    """The kernels, optional: without a compiler for the instructions, workers log it and run without kernels."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return []
    # torch's libgomp has the system library's name: loader.py imports torch first, so the kernels use torch's.
    return [
        Extension(
            f"decant.engine.cpu.kernels.{name}",
            [f"{KERNELS}/{source}"],
            depends=[str(path) for pattern in ("*.h", "*.cpp") for path in sorted(KERNELS.glob(pattern))],
            extra_compile_args=[*FLAGS, *instructions],
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
        )
        for name, (source, instructions) in CPUS.items()
    ]


setup(
    ext_modules=extensions(),
    cmdclass={"build": Build, "compile_protos": CompileProtos},
    options={"build_ext": {"parallel": len(CPUS)}},
)
