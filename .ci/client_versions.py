"""Try the client with the oldest and the newest grpcio and protobuf, beside tritonclient where it allows them.

    python .ci/client_versions.py

Needs a package index. Each environment gets the wheel; its client calls a deployment of this checkout.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.build.environments import UV, build_wheel, copy_sources, image_sources, make_environment, succeed
from tests.e2e.deployment import deployment

ENVIRONMENTS = {
    "oldest, beside tritonclient": ("grpcio==1.71.0", "protobuf==6.33.0", "tritonclient[grpc]"),
    "newest, beside tritonclient": ("grpcio", "tritonclient[grpc]"),
    "newest": ("grpcio", "protobuf"),
}

PROGRAM = """
import asyncio, sys, warnings
from importlib.metadata import version
warnings.simplefilter("error")
import decant

ADDRESS, OTHER = sys.argv[1], sys.argv[2:]
PROMPT = "def read_lines(path):\\n"

async def ask():
    async with decant.AsyncClient(ADDRESS) as client:
        return (await client.generate(PROMPT, max_tokens=8, temperature=0)).text

with decant.Client(ADDRESS) as client:
    text = client.generate(PROMPT, max_tokens=8, temperature=0).text
    with client.stream(PROMPT, max_tokens=8, temperature=0, logprobs=1) as stream:
        assert "".join(delta.text for delta in stream) == text
    assert asyncio.run(ask()) == text
    try:
        client.generate(PROMPT, top_p=2)
    except decant.InvalidArgument as error:
        assert error.field == "sampling.top_p"
    else:
        raise AssertionError("accepted")
warnings.resetwarnings()
for module in OTHER:
    __import__(module)
print("grpcio", version("grpcio"), "protobuf", version("protobuf"), *OTHER)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as made, deployment(prefill=0) as running:
        folder = Path(made)
        wheel = build_wheel(copy_sources(image_sources(), folder / "tree"), folder / "wheel")
        for name, packages in ENVIRONMENTS.items():
            python = make_environment(folder / name.replace(",", "").replace(" ", "-"))
            succeed(UV, "pip", "install", "--quiet", "--python", python, wheel, *packages, cwd=folder)
            other = ["tritonclient.grpc"] if "tritonclient[grpc]" in packages else []
            print(f"{name}: {succeed(python, '-c', PROGRAM, running.address, *other, cwd=folder).strip()}", flush=True)


if __name__ == "__main__":
    main()
