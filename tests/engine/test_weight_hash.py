from __future__ import annotations

import os
import resource
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from decant.engine.checkpoint import weight_hash
from decant.engine.errors import ModelRefused
from decant.engine.loading import load
from decant.engine.model import model, probe

digest_files = partial(weight_hash.digest_files, min_cached_bytes=0, min_cached_age_ns=-1)
"""Small and new files are cached, too."""


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    read, names = weight_hash.read_digest, []

    def noted(file: Path) -> str:
        names.append(file.name)
        return read(file)

    monkeypatch.setattr(weight_hash, "read_digest", noted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return names


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(bytes(range(256)) * 100)
    return file


@pytest.mark.parametrize("at", [0, 1, 9_999, 12_800, 25_599])
def test_a_digest_depends_on_every_byte(at, weights):
    before = digest_files([weights]).values
    content = bytearray(weights.read_bytes())
    content[at] ^= 1
    weights.write_bytes(content)
    assert digest_files([weights]).values != before


def test_a_second_start_reads_nothing(weights, reads):
    first, second = digest_files([weights]), digest_files([weights])
    assert first.values == second.values
    assert reads == ["model.safetensors"]
    assert [file.name for file in weights.parent.iterdir() if file != weights] == [".model.safetensors.xxh128"]


def test_a_file_of_the_same_size_and_time_is_read_again(weights, reads):
    before, times = digest_files([weights]).values, weights.stat()
    weights.write_bytes(bytes(len(weights.read_bytes())))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest_files([weights]).values != before
    assert len(reads) == 2


def test_a_replaced_file_is_read_again(weights, reads):
    before, times = digest_files([weights]).values, weights.stat()
    other = weights.with_name("other")
    other.write_bytes(bytes(times.st_size))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(weights)
    assert digest_files([weights]).values != before
    assert len(reads) == 2


def test_a_read_only_folder_has_its_digests_in_the_users_cache(weights, reads, tmp_path):
    (weights.parent / ".model.safetensors.xxh128").mkdir()  # as root may write to any folder
    assert digest_files([weights]).values == digest_files([weights]).values
    assert reads == ["model.safetensors"]
    assert len(list((tmp_path / "cache" / "decant" / "weights").iterdir())) == 1
    assert len(list(weights.parent.iterdir())) == 2


def test_without_a_writable_cache_a_file_is_read_each_time(weights, reads, monkeypatch, tmp_path):
    (weights.parent / ".model.safetensors.xxh128").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert digest_files([weights]).values == digest_files([weights]).values
    assert len(reads) == 2


def test_a_crash_while_a_digest_is_kept_leaves_no_file_but_the_kept_one(weights, reads):
    child = os.fork()
    if child == 0:
        limit = 0  # bytes of a file that may be written: SIGXFSZ ends the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        digest_files([weights])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGXFSZ
    assert {file.name for file in weights.parent.iterdir()} <= {"model.safetensors", ".model.safetensors.xxh128"}
    assert digest_files([weights]).values == digest_files([weights]).values
    assert reads == ["model.safetensors"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"stamp": 3}', b'{"stamp": [1, 2, 3, 4], "digest": "x"}'])
def test_a_kept_digest_that_is_broken_or_of_another_file_is_read_again(content, weights, reads):
    before = digest_files([weights]).values
    (weights.parent / ".model.safetensors.xxh128").write_bytes(content)
    assert digest_files([weights]).values == before
    assert len(reads) == 2


def test_the_digest_of_a_just_written_file_is_not_cached(weights, reads):
    """A second write in the same tick of the clock would leave the same times."""
    digest_files([weights, weights], min_cached_age_ns=3600 * 10**9)
    digest_files([weights], min_cached_age_ns=3600 * 10**9)
    assert len(reads) == 2


def test_a_file_that_changes_while_it_is_loaded_refuses_the_model(weights):
    digests = digest_files([weights])
    digests.check_unchanged("m")
    weights.write_bytes(b"other")
    with pytest.raises(ModelRefused, match=r"model\.safetensors changed while it was loaded"):
        digests.check_unchanged("m")


def test_a_file_changed_between_mapping_and_copying_refuses_the_model(tiny_llama, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "served"))

    def learn_while_written(*args):
        with (folder / "model.safetensors").open("r+b") as stream:  # with what it has: other weights may fail the probe
            first = stream.read(8)
            stream.seek(0)
            stream.write(first)
        return probe.learn_attention(*args)

    monkeypatch.setattr(model, "learn_attention", learn_while_written)
    with pytest.raises(ModelRefused, match="changed while it was loaded"):
        load(model.ModelConfig(str(folder), device="cpu", kv_bytes=1 << 20))
