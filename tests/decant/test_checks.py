from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from decant.command.errors import CommandFailed
from decant.command.up import checks, listeners, resources
from decant.command.up import command as starting
from decant.command.up.command import check
from decant.command.up.options import UpOptions
from decant.models import path
from decant.runtime import host_memory
from decant.state.private_redis import PrivateRedis
from decant.state.urls import SCHEMES
from tests import gguf_files
from tests.runtime.certificates import Certificates

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(path(), tmp_path / "model"))


def refusal(**options: Any) -> str:
    with pytest.raises(CommandFailed) as caught:
        check(UpOptions(**{"port": 0, "kv_memory": "32M", **options}))
    assert caught.value.status == 2
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_servable_models_are_accepted(model: Path) -> None:
    check(UpOptions(model=str(model), port=0, kv_memory="32M"))
    check(UpOptions(port=0))


def test_a_folder_that_is_not_there_is_no_hub_name(tmp_path: Path) -> None:
    assert refusal(model=str(tmp_path / "nowhere")) == f"--model: no such folder: {tmp_path}/nowhere"
    for name in ("./nowhere", "~/nowhere", "models/of/mine"):
        assert refusal(model=name) == f"--model: no such folder: {name}"


def test_an_empty_model_name_is_refused_instead_of_serving_the_default() -> None:
    assert refusal(model="") == "--model: a folder, a GGUF file or a hub name, got ''"


def test_a_file_is_refused_as_a_model_without_asking_the_hub(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    needed = "it is a file; a folder, a GGUF file or a hub name is needed"
    assert refusal(model=f"{tmp_path}/model.bin").endswith(needed)
    (tmp_path / "model.gguf").touch()
    assert refusal(model=f"{tmp_path}/model.gguf") == f"--model: {tmp_path}/model.gguf: it is empty"


def test_a_gguf_file_is_accepted_as_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = gguf_files.small().write(tmp_path / "model.gguf")
    check(UpOptions(model=str(file), port=0, kv_memory="32M"))
    assert resources.weights_size(str(file), "float32") == file.stat().st_size


def break_config(model: Path) -> str:
    (model / "config.json").write_text("{")
    return "its configuration can't be read"


def remove_config(model: Path) -> str:
    (model / "config.json").unlink()
    return "the folder has no config.json"


def remove_tokenizer(model: Path) -> str:
    (model / "tokenizer.json").unlink()
    return "it has no tokenizer.json"


def break_tokenizer(model: Path) -> str:
    (model / "tokenizer.json").write_text("{")
    return "tokenizer.json can't be read"


def quantize(model: Path) -> str:
    change_config(model, quantization_config={"quant_method": "hqq"})
    return "HQQ weights are not served yet"


def replace_weights_by_a_pickle(model: Path) -> str:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return "safetensors are needed"


def cut_weights(model: Path) -> str:
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 10)
    return "its header says"


def make_weights_integers(model: Path) -> str:
    header = json.dumps({"a.weight": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    return "I8 weights are not served yet"


def change_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def name_an_unknown_model_type(model: Path) -> str:
    change_config(model, model_type="llamma")
    return f"llamma ({model}) is not served: transformers has no code for it"


def ask_for_code_of_its_own(model: Path) -> str:
    change_config(model, model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    return "its configuration requires remote code (auto_map), which is never run"


def widen_the_configuration(model: Path) -> str:
    change_config(model, hidden_size=512)
    return "in model.safetensors is [4096, 256], and by config.json vocab_size x hidden_size is [4096, 512]"


def change_the_vocabulary(model: Path) -> str:
    change_config(model, vocab_size=5000)
    return "vocab_size x hidden_size is [5000, 256]"


def change_the_heads(model: Path) -> str:
    change_config(model, num_key_value_heads=4)
    return "(num_key_value_heads x head_dim) x hidden_size is [128, 256]"


def add_a_layer_to_the_configuration(model: Path) -> str:
    change_config(model, num_hidden_layers=5)
    return "model.layers.4.self_attn.q_proj.weight among them; config.json says num_hidden_layers = 5"


def take_a_layer_from_the_configuration(model: Path) -> str:
    change_config(model, num_hidden_layers=3)
    return "model.layers.3.input_layernorm.weight among them; config.json says num_hidden_layers = 3"


BREAKS = [
    name_an_unknown_model_type,
    ask_for_code_of_its_own,
    widen_the_configuration,
    change_the_vocabulary,
    change_the_heads,
    add_a_layer_to_the_configuration,
    take_a_layer_from_the_configuration,
    break_config,
    remove_config,
    remove_tokenizer,
    break_tokenizer,
    quantize,
    replace_weights_by_a_pickle,
    cut_weights,
    make_weights_integers,
]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda function: function.__name__)
def test_a_model_that_can_not_be_served_is_refused_with_the_reason(model: Path, break_it: Any) -> None:
    reason = break_it(model)
    line = refusal(model=str(model))
    assert line.startswith("--model: ")
    assert reason in line


def test_memory_is_compared_with_what_is_free(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: 8 * GIB)
    assert refusal(kv_memory="4G") == (
        "memory: 2 workers with 6.3 MiB of weights and 4.0 GiB of KV cache each, and 8.0 GiB are free; "
        "start fewer workers, or give less with --kv-memory"
    )
    assert "12.5 MiB of weights" in refusal(kv_memory="4G", dtype="float32")
    assert "41 workers" in refusal(kv_memory="1M", prefill=40)
    assert refusal(kv_memory="0") == "--kv-memory: a size above 0, such as 512M or 2G, got 0"
    check(UpOptions(port=0, kv_memory="3G"))
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1 << 20)
    assert "memory: " in refusal(kv_memory=None)


@contextmanager
def taken_port() -> Iterator[int]:
    """Take a port; the one below it is free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as below:
            port: int = taken.getsockname()[1]
            below.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                below.bind(("127.0.0.1", port - 1))
            except OSError:
                continue
            yield port
            return


def test_a_port_in_use_is_refused_with_the_process_that_holds_it() -> None:
    with taken_port() as port:
        line = refusal(port=port)
        assert line.startswith(f"--port: {port} is in use by process {os.getpid()} (")
        assert f"--port: {port} is in use" in refusal(port=port - 1, router=2)
    assert listeners.listener(port) is None
    check(UpOptions(port=port, kv_memory="32M"))


def test_a_gateway_needs_its_package_and_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with taken_port() as port:
        for name in ("openai", "gateway"):
            assert refusal(**{name: port}).startswith(f"--{name}: {port} is in use by process {os.getpid()} (")
    check(UpOptions(port=0, kv_memory="32M", openai=0, gateway=0))
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert refusal(openai=0) == "--openai: needs smg: pip install 'decant-llm[openai]'"
    assert refusal(gateway=0) == "--gateway: needs starlette: pip install 'decant-llm[gateway]'"
    check(UpOptions(port=0, kv_memory="32M"))


def test_without_proc_a_port_in_use_is_refused_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_PROC", tmp_path / "proc")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refusal(port=port).startswith(f"--port: {port} is in use by another process; ")


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    assert refusal(host="203.0.113.1", port=6009).startswith("--host: can't listen on 203.0.113.1:6009: ")
    assert refusal(host="203.0.113.1", port=0).startswith("--host: can't listen on 203.0.113.1:0: ")


def test_a_redis_that_does_not_answer_is_refused() -> None:
    assert refusal(redis_url="redis://127.0.0.1:1").startswith("--redis-url: ")
    assert refusal(redis_url="foo") == f"--redis-url: begins with one of {', '.join(SCHEMES)}, got foo"
    for port in ("port", "65536"):
        url = f"redis://127.0.0.1:{port}"
        assert refusal(redis_url=url) == "--redis-url: host:port with a port from 0 to 65535, got another port"
    with PrivateRedis() as redis:
        check(UpOptions(port=0, kv_memory="32M", redis_url=redis.url))


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    made = Certificates(tmp_path)

    def name(**changes: Path | str) -> None:
        files = {"ca": made.ca, "certificate": made.certificate, "key": made.key, **changes}
        for field, value in files.items():
            monkeypatch.setenv(f"DECANT_PEER_{field.upper()}", str(value))

    return name


def test_certificates_with_which_processes_reach_each_other_pass(peers: Callable[..., None]) -> None:
    peers()
    check(UpOptions(port=0, kv_memory="32M"))
    peers(name="worker.decant")
    check(UpOptions(port=0, kv_memory="32M"))


@pytest.mark.parametrize("field", ["ca", "certificate", "key"])
def test_a_certificate_file_that_can_not_be_used_is_refused_by_its_variable(
    field: str, peers: Callable[..., None], tmp_path: Path
) -> None:
    missing = tmp_path / "missing.pem"
    peers(**{field: missing})
    variable = f"DECANT_PEER_{field.upper()}"
    assert refusal() == f"{variable}: a file that can be read (No such file or directory), got {missing}"
    named = "certificate" if field == "key" else field
    (tmp_path / "empty.pem").touch()
    peers(**{field: tmp_path / "empty.pem"})
    assert refusal().startswith(f"DECANT_PEER_{named.upper()}: ")


def test_certificates_that_do_not_belong_together_are_refused(peers: Callable[..., None], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    foreign = Certificates(other)
    peers(key=foreign.key)
    assert "with the unencrypted key" in refusal()
    peers(ca=foreign.ca)
    assert refusal().startswith(f"DECANT_PEER_CERTIFICATE: a certificate that {foreign.ca} accepts (")
    peers(name="another.name")
    assert "'another.name'" in refusal()


def test_nothing_is_started_for_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "supervise", lambda *_: pytest.fail("it started"))
    with pytest.raises(CommandFailed):
        starting.run(UpOptions(model="/nowhere"))


@pytest.mark.slow
def test_no_torch_is_loaded_for_the_checks() -> None:
    program = (
        "import sys; from decant.command.up.command import UpOptions, check; "
        "check(UpOptions(port=0, kv_memory='32M')); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
