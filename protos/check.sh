#!/bin/sh
# Fails when the contract is not clean, breaks its last released version, or when the stubs in
# service/pb are not what the proto generates.
set -eu
cd "$(dirname "$0")/.."
bin="$(dirname "${PYTHON:-.venv/bin/python}")"
"$bin/buf" lint protos
"$bin/buf" breaking protos --against protos/baseline.txtpb
fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT
sh protos/generate.sh "$fresh" 2> "$fresh/messages" || {
    cat "$fresh/messages" >&2
    exit 1
}
diff -r -x __init__.py -x __pycache__ "$fresh/service/pb" service/pb || {
    echo "service/pb is not what protos/ generates; run: make protos" >&2
    exit 1
}
