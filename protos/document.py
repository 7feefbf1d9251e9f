"""Writes README.md beside it: guide.md, then a reference made from the comments of the proto.

python protos/document.py [FILE]
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

FOLDER = Path(__file__).parent
PROTO = "tandem/v1/generation.proto"
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6  # field numbers of FileDescriptorProto, as in its paths
_FIELD, _NESTED, _NESTED_ENUM = 2, 3, 4  # of DescriptorProto
_VALUE, _METHOD = 2, 2  # of EnumDescriptorProto and ServiceDescriptorProto
_Path = tuple[int, ...]


def read_proto() -> FileDescriptorProto:
    """The proto with its comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        status = protoc.main(
            [
                "protoc",
                f"-I{FOLDER}",
                f"-I{Path(protoc.__file__).parent / '_proto'}",
                "--include_source_info",
                f"--descriptor_set_out={out}",
                PROTO,
            ]
        )
        if status:
            raise SystemExit(f"protoc ended with status {status}")
        return FileDescriptorSet.FromString(out.read_bytes()).file[-1]


class Reference:
    """The reference of one file, in the order of its declarations."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): location.leading_comments
            for location in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        yield "## Reference"
        for index, service in enumerate(self._file.service):
            path: _Path = (_SERVICE, index)
            yield from ("", f"### {service.name}", "", self._text(path))
            for number, method in enumerate(service.method):
                stream = "stream of " if method.server_streaming else ""
                request, answer = _short(method.input_type), _short(method.output_type)
                yield from ("", f"#### {method.name}", "")
                yield f"{_link(request)} → {stream}{_link(answer)}"
                yield from ("", self._text((*path, _METHOD, number)))
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (_MESSAGE, index), message.name)
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (_ENUM, index), enum.name)

    def _message(self, message: DescriptorProto, path: _Path, name: str) -> Iterator[str]:
        if message.options.map_entry:
            return
        yield from ("", f"### {name}", "")
        yield from self._optional_text(path)
        if message.field:
            yield from ("| field | type | |", "|---|---|---|")
        for index, field in enumerate(message.field):
            text = self._cell((*path, _FIELD, index))
            yield f"| `{field.name}` | {_type(field, message)} | {text} |"
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, (*path, _NESTED, index), f"{name}.{nested.name}")
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, _NESTED_ENUM, index), f"{name}.{enum.name}")

    def _enum(self, enum: EnumDescriptorProto, path: _Path, name: str) -> Iterator[str]:
        yield from ("", f"### {name}", "")
        yield from self._optional_text(path)
        yield from ("| value | |", "|---|---|")
        for index, value in enumerate(enum.value):
            yield f"| `{value.name}` | {self._cell((*path, _VALUE, index))} |"

    def _optional_text(self, path: _Path) -> Iterator[str]:
        text = self._text(path)
        if text:
            yield from (text, "")

    def _text(self, path: _Path) -> str:
        comment = self._comments.get(path, "")
        return "\n".join(line.removeprefix(" ") for line in comment.rstrip().splitlines())

    def _cell(self, path: _Path) -> str:
        return " ".join(self._text(path).split()).replace("|", "\\|")


def _short(type_name: str) -> str:
    return type_name.removeprefix(".tandem.v1.").removeprefix(".google.protobuf.")


def _link(name: str) -> str:
    return f"[{name}](#{name.lower().replace('.', '')})"


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    name = _short(field.type_name)
    if name:
        entry = next(
            (n for n in message.nested_type if n.options.map_entry and name.endswith(n.name)), None
        )
        if entry is not None:
            return f"map of {_type(entry.field[0], entry)} to {_type(entry.field[1], entry)}"
        kind = name if field.type_name.startswith(".google.") else _link(name)
    else:
        kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "README.md"
    guide = (FOLDER / "guide.md").read_text(encoding="utf-8").rstrip()
    reference = "\n".join(Reference(read_proto()).lines())
    out.write_text(f"{guide}\n\n{reference}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
