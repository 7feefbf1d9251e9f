#!/bin/sh
# Proves and measures the engine on CUDA in under eight minutes, without network or weights; on a
# machine without CUDA the same on a small pair on the CPU. Arguments go to tests.benchmarks.gpu.
#   PYTHON=python3 sh tests/benchmarks/gpu.sh --sizes 8b --agreement 0.8
set -eu
cd "$(dirname "$0")/../.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec timeout 480 "$PYTHON" -m tests.benchmarks.gpu "$@"
