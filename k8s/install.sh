#!/bin/sh
# Installs Tandem with the tested versions into a new virtual environment, with its bill of
# materials in sbom.cdx.json. Run from the repository's root, by the Dockerfile and by its test.
#   sh k8s/install.sh FOLDER cpu|cuda
set -eu
folder=$1
variant=$2
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
export PIP_ONLY_BINARY=:all: # nothing is compiled, so that the builder needs no compiler either

case $variant in
    cpu) index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu} extras=postgresql,oidc ;;
    cuda) index=${TORCH_INDEX-} extras=postgresql,oidc,nvidia ;; # PyPI's wheel brings CUDA
    *) echo "unknown variant $variant: cpu or cuda" >&2; exit 2 ;;
esac

${PYTHON:-python3} -m venv "$folder"
if [ -n "$index" ]; then
    "$folder/bin/pip" install --quiet --constraint constraints.txt --no-deps --index-url "$index" torch
fi
"$folder/bin/pip" install --quiet --constraint constraints.txt ".[$extras]"

tools=$(mktemp -d)
${PYTHON:-python3} -m venv "$tools"
"$tools/bin/pip" install --quiet 'cyclonedx-bom>=7,<8'
"$tools/bin/cyclonedx-py" environment --gather-license-texts \
    --output-file "$folder/sbom.cdx.json" "$folder/bin/python"
rm -rf "$tools"
