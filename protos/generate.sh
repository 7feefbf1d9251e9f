#!/bin/sh
# Regenerates the stubs in service/pb from the proto, or writes them below the folder given:
#   protos/generate.sh [FOLDER]
# The virtual path makes the generated code import itself as service.pb.
set -eu
cd "$(dirname "$0")/.."
out="${1:-.}"
PATH="$(dirname "${PYTHON:-.venv/bin/python}"):$PATH" "${PYTHON:-.venv/bin/python}" -m grpc_tools.protoc \
    -Iservice/pb=protos/tandem/v1 \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
    protos/tandem/v1/generation.proto
