"""A model is loaded from safetensors alone, known by its content, and refused with the reason."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    ViTConfig,
)

from engine.loader import (
    UnsupportedModelError,
    check_same_vocabulary,
    describe_model,
    load_model,
    resolve_device,
    resolve_dtype,
)
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE, save_tiny_model, tiny_llama, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "tiny")


def test_a_saved_model_comes_back_with_its_weights_and_limits(folder: Path) -> None:
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    assert loaded.name == str(folder)
    assert loaded.max_context_tokens == 512
    assert loaded.eos_token_ids == (EOS_TOKEN_ID,)
    assert not loaded.model.training
    original = tiny_llama()
    assert loaded.num_parameters == sum(p.numel() for p in original.parameters())
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, original.get_parameter(name))
        assert not parameter.requires_grad


def test_the_dtype_that_was_asked_for_is_loaded(folder: Path) -> None:
    assert load_model(str(folder), dtype="bfloat16", device="cpu").model.dtype is torch.bfloat16


def test_pickled_weights_are_never_read(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_model(str(folder), dtype="float32", device="cpu")


def test_a_model_with_its_own_code_is_not_run(folder: Path) -> None:
    (folder / "config.json").write_text(
        '{"model_type": "homemade", "auto_map": {"AutoConfig": "code.Config",'
        ' "AutoModelForCausalLM": "code.Model"}}'
    )
    witness = folder / "was_run"
    (folder / "code.py").write_text(f"open({str(witness)!r}, 'w')")
    with pytest.raises(ValueError, match=r"trust_remote_code|homemade"):
        load_model(str(folder), dtype="float32", device="cpu")
    assert not witness.exists()


@pytest.mark.parametrize(
    ("config", "reason"),
    [(T5Config(), "encoder-decoder"), (ViTConfig(), "no causal language model")],
)
def test_what_is_no_causal_language_model_is_refused_with_the_reason(
    tmp_path: Path,
    config,  # type: ignore[no-untyped-def]
    reason: str,
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(str(tmp_path), dtype="float32", device="cpu")


def test_a_model_that_states_no_context_length_is_refused() -> None:
    config = BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModelError, match="context length"):
        describe_model("tiny", BloomForCausalLM(config), tiny_tokenizer())


def fingerprint(folder: Path) -> str:
    return load_model(str(folder), dtype="float32", device="cpu").fingerprint


def test_a_copy_elsewhere_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(folder)


def test_other_weights_have_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    assert fingerprint(other) != fingerprint(folder)


def test_one_changed_weight_of_a_small_file_changes_the_fingerprint(folder: Path) -> None:
    before = fingerprint(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(folder) != before


def test_another_configuration_has_another_fingerprint(folder: Path) -> None:
    before = fingerprint(folder)
    config = (folder / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06' in config
    (folder / "config.json").write_text(
        config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    )
    assert fingerprint(folder) != before


def test_a_model_in_memory_is_known_by_its_weights() -> None:
    prints = [
        describe_model("tiny", tiny_llama(seed), tiny_tokenizer()).fingerprint for seed in (0, 0, 1)
    ]
    assert prints[0] == prints[1] != prints[2]


def with_end_tokens(generation: object, config: object) -> LlamaForCausalLM:
    model = tiny_llama()
    model.config.eos_token_id = config  # type: ignore[assignment]
    assert model.generation_config is not None
    model.generation_config.eos_token_id = generation  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (EOS_TOKEN_ID,)),
        ([7, 5], None, (EOS_TOKEN_ID, 5, 7)),
        (0, [9], (0, EOS_TOKEN_ID, 9)),
    ],
)
def test_every_stated_end_token_ends_a_request(
    generation: object, config: object, expected: tuple[int, ...]
) -> None:
    loaded = describe_model("tiny", with_end_tokens(generation, config), tiny_tokenizer())
    assert loaded.eos_token_ids == expected


def test_automatic_dtype_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("engine.loader._cpu_has_bf16", lambda: False)
    assert resolve_dtype("auto", cpu) is torch.float32
    monkeypatch.setattr("engine.loader._cpu_has_bf16", lambda: True)
    assert resolve_dtype("auto", cpu) is torch.bfloat16
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert resolve_dtype("float32", torch.device("cuda")) is torch.float32


@pytest.mark.parametrize("wanted", ["float99", "nn", ""])
def test_an_unknown_dtype_is_refused_by_name(wanted: str) -> None:
    with pytest.raises(ValueError, match="dtype"):
        resolve_dtype(wanted, torch.device("cpu"))


def test_automatic_device_is_the_cpu_without_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    assert resolve_device("cuda:1") == torch.device("cuda:1")


def words(*names: str) -> PreTrainedTokenizerFast:
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names[0]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=names[0])


def test_the_same_vocabulary_is_accepted() -> None:
    check_same_vocabulary(tiny_tokenizer(), tiny_tokenizer())
    assert len(tiny_tokenizer().get_vocab()) == VOCAB_SIZE


@pytest.mark.parametrize(
    ("draft", "token"),
    [
        (("<unk>", "b", "a"), "'a' is 1 for the target and 2|'b' is 2 for the target and 1"),
        (("<unk>", "a"), "'b' is 2 for the target and None"),
        (("<unk>", "a", "b", "c"), "'c' is None for the target and 3"),
    ],
)
def test_a_draft_model_with_another_vocabulary_is_refused_with_the_token(
    draft: tuple[str, ...], token: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=token) as found:
        check_same_vocabulary(words("<unk>", "a", "b"), words(*draft))
    assert "speculation.draft_model" in str(found.value)
