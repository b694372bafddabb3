import subprocess
import sys

LOADED = """
import sys
before = set(sys.modules)
import decant
decant.Client
print("\\n".join(sorted(set(sys.modules) - before)))
"""

OURS = {"decant.client", "decant.protos", "decant.runtime"}
# grpcio needs typing_extensions and loads its companion packages when installed.
GRPC = {"grpc", "google", "grpc_health", "grpc_reflection", "grpc_status", "grpc_tools", "typing_extensions"}
EXTENSIONS = {"cygrpc", "cython_runtime"}  # left by compiled modules
RUNTIME = {
    "decant.runtime",
    "decant.runtime.backoff",
    "decant.runtime.errors",
    "decant.runtime.error_details",
    "decant.runtime.grpc_options",
    "decant.runtime.telemetry",
    "decant.runtime.telemetry.tracing",
}
COMMAND_MODULES = {
    "typer",
    "rich",
    "redis",
    "pydantic",
    "torch",
    "transformers",
    "tokenizers",
    "structlog",
    "cryptography",
}


def loaded_by(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_client_loads_the_standard_library_grpc_and_protobuf_alone() -> None:
    loaded = loaded_by(LOADED)
    others = {name.partition(".")[0] for name in loaded if not name.startswith("_")}
    assert not others - {"decant"} - GRPC - EXTENSIONS - sys.stdlib_module_names
    ours = {".".join(name.split(".")[:2]) for name in loaded if name.startswith("decant.")}
    assert ours == OURS
    assert {name for name in loaded if name.startswith("decant.runtime")} == RUNTIME


def test_packages_of_servers_load_no_client_and_no_grpc() -> None:
    loaded = loaded_by(LOADED.replace("decant.Client", "import decant.engine.scheduler"))
    assert "decant.engine.scheduler" in loaded
    assert not any(name.startswith(("decant.client", "grpc")) for name in loaded)


def test_the_command_imports_what_it_needs_when_it_needs_it() -> None:
    loaded = loaded_by(LOADED.replace("decant.Client", "import decant.command"))
    assert not {name.partition(".")[0] for name in loaded} & COMMAND_MODULES
