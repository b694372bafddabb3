"""protos/inference.proto with its comments, which the compiled modules lack."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

PROTOS = Path(__file__).parents[2] / "protos"
TITLE = re.compile(r"-{10,} (.+)")

# Field numbers of descriptor.proto: an element's path alternates such numbers and positions.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
NESTED, NESTED_ENUMS, FIELDS = 3, 4, 2
VALUES = METHODS = 2
SYNTAX = 12

FilePath = tuple[int, ...]


class Comment(NamedTuple):
    """Comments above an element, beside it, and above it with an empty line between."""

    above: str
    beside: str
    apart: str

    @property
    def text(self) -> str:
        return self.above or self.beside

    @property
    def section(self) -> str:
        match = TITLE.search(self.apart)
        return match[1].strip() if match else ""


NONE = Comment("", "", "")


class CommentedFile:
    def __init__(self, name: str = "inference.proto") -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "set"
            options = ["-I", str(PROTOS), f"--descriptor_set_out={out}", "--include_source_info"]
            subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, name], check=True)
            (self.file,) = FileDescriptorSet.FromString(out.read_bytes()).file
        self._comments = _comments(self.file)

    def of(self, *path: int) -> Comment:
        return self._comments.get(path, NONE)

    @property
    def rules(self) -> str:
        comment = self.of(SYNTAX)
        return comment.above or comment.apart


def _comments(file: FileDescriptorProto) -> dict[FilePath, Comment]:
    return {
        tuple(location.path): Comment(
            _text(location.leading_comments),
            _text(location.trailing_comments),
            "\n\n".join(_text(part) for part in location.leading_detached_comments),
        )
        for location in file.source_code_info.location
    }


def _text(comment: str) -> str:
    return textwrap.dedent(comment).strip("\n").rstrip()
