"""Heads that other programs wrote load as the same head; what was not stated is said."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.drafter.head.config import HeadConfig, HeadFormatError
from engine.drafter.head.export import FORMATS, export_head
from engine.drafter.head.file_names import CONFIG, WEIGHTS
from engine.drafter.head.files import load_head, save_head
from engine.drafter.head.importing import Imported, import_head
from engine.drafter.head.model import Eagle3Head
from engine.loader import LoadedModel
from tests.engine.heads import NUM_LAYERS, config_for, random_head, tiny_target
from tests.tiny import VOCAB_SIZE

_VOCABULARY = list(range(3, 203))
_PLAIN = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_before_residual": False,
    "norm_output": False,
}
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_target()


def _head(target: LoadedModel, **changes: Any) -> Eagle3Head:
    config = config_for(target, draft_vocab_size=len(_VOCABULARY))
    return random_head(target, replace(config, **{**_PLAIN, **changes}), _VOCABULARY)


def _written(head: Eagle3Head, target: LoadedModel, out: Path, change: Change) -> Path:
    """A folder in the dialect eagle, changed into what another program would have written."""
    export_head(head, {}, out, target, "eagle", dtype=torch.float32)
    content = json.loads((out / CONFIG).read_text())
    state = load_file(out / WEIGHTS)
    change(content, state)
    (out / CONFIG).write_text(json.dumps(content))
    save_file(state, out / WEIGHTS)
    return out


def _same(found: Imported, head: Eagle3Head) -> None:
    ours = replace(head.config, target_name="", target_architecture="")
    theirs = replace(found.head.config, target_name="", target_architecture="")
    assert theirs == ours
    for name, tensor in head.state_dict().items():
        assert torch.equal(found.head.state_dict()[name], tensor), name


def _noted(found: Imported, field: str) -> bool:
    return any(note.startswith(f"{field}:") for note in found.notes)


def test_safeailab_states_no_layers_and_no_embedding(target: LoadedModel, tmp_path: Path) -> None:
    def change(content: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        del content["eagle_config"], state["embed_tokens.weight"]

    head = _head(target)
    found = import_head(_written(head, target, tmp_path / "h", change), target)
    assert found.dialect == "eagle"
    _same(found, head)
    assert _noted(found, "eagle_aux_hidden_state_layer_ids")
    assert _noted(found, "embed_tokens.weight")


def test_specforge_names_the_layers_whose_output_it_reads(
    target: LoadedModel, tmp_path: Path
) -> None:
    def change(content: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        ids = [1, NUM_LAYERS // 2 - 1, NUM_LAYERS - 4]
        content["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        content["norm_output"] = True  # its norm before the output layer, not ours

    head = _head(target)
    assert head.config.captured_layers == (2, NUM_LAYERS // 2, NUM_LAYERS - 3)
    found = import_head(_written(head, target, tmp_path / "h", change), target)
    _same(found, head)
    assert _noted(found, "eagle_aux_hidden_state_layer_ids")


def test_a_pickle_is_read_as_tensors_alone(target: LoadedModel, tmp_path: Path) -> None:
    head = _head(target)
    folder = _written(head, target, tmp_path / "h", lambda content, state: None)
    state = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(state, folder / "pytorch_model.bin")
    _same(import_head(folder, target), head)
    torch.save({"code": print}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        import_head(folder, target)


def test_nvidia_keeps_ids_and_flags_in_a_nested_table(target: LoadedModel, tmp_path: Path) -> None:
    plain = _head(target)
    head = _head(target, norm_before_fc=True)
    head.load_state_dict({**head.state_dict(), **plain.state_dict()})

    def change(content: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        content["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
            "norm_before_fc": True,
        }
        state["input_norm.weight"] = head.input_norm.weight.clone()

    found = import_head(_written(plain, target, tmp_path / "h", change), target)
    assert found.dialect == "nvidia"
    assert found.head.config.captured_layers == (1, 3, 6)
    _same(found, _restated(head, captured_layers=(1, 3, 6)))


def _restated(head: Eagle3Head, **changes: Any) -> Eagle3Head:
    other = Eagle3Head(replace(head.config, **changes))
    other.load_state_dict(head.state_dict())
    return other


def test_scaled_positions_are_refused_unless_they_shall_be_undone(
    target: LoadedModel, tmp_path: Path
) -> None:
    def change(content: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        content["rope_scaling"] = {"rope_type": "yarn", "factor": 32.0}

    head = _head(target)
    folder = _written(head, target, tmp_path / "h", change)
    with pytest.raises(HeadFormatError, match="rope_scaling: 'yarn'"):
        import_head(folder, target)
    found = import_head(folder, target, undo_rope_scaling=True)
    assert _noted(found, "rope_scaling")
    _same(found, head)


@pytest.mark.parametrize("place", ["beside", "above", "in the weights"])
def test_nemo_has_a_prefix_and_its_vocabulary_elsewhere(
    target: LoadedModel, tmp_path: Path, place: str
) -> None:
    selected = torch.tensor(_VOCABULARY)

    def change(content: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        content["architectures"] = ["LlamaEagle3DraftModel"]
        del state["d2t"], state["t2d"]
        for name in list(state):
            ours = name.replace("midlayer.", "layers.0.")
            state[f"model.{ours}"] = state.pop(name)
        if place == "in the weights":
            state["selected_token_ids"] = selected.clone()

    head = _head(target)
    folder = _written(head, target, tmp_path / "run" / "model", change)
    if place != "in the weights":
        meta = folder if place == "beside" else folder.parent
        torch.save({"selected_token_ids": selected}, meta / "eagle_meta.pt")
    found = import_head(folder, target)
    assert found.dialect == "nemo"
    _same(found, head)


def test_flags_that_speculators_leaves_out_get_its_defaults_and_are_named(
    target: LoadedModel, tmp_path: Path
) -> None:
    head = _head(target)
    save_head(tmp_path, head, {}, dtype=torch.float32)
    content = json.loads((tmp_path / CONFIG).read_text())
    for flag in _PLAIN:
        del content[flag]
    (tmp_path / CONFIG).write_text(json.dumps(content))
    with pytest.raises(HeadFormatError, match="norm_before_fc: is missing"):
        load_head(tmp_path, target.model)
    found = import_head(tmp_path, target)
    _same(found, head)
    assert all(_noted(found, flag) for flag in _PLAIN)


def test_a_norm_that_is_there_counts_more_than_a_flag(target: LoadedModel, tmp_path: Path) -> None:
    head = _head(target, norm_before_fc=True)
    save_head(tmp_path, head, {}, dtype=torch.float32)
    content = json.loads((tmp_path / CONFIG).read_text())
    content["norm_before_fc"] = False
    (tmp_path / CONFIG).write_text(json.dumps(content))
    found = import_head(tmp_path, target)
    assert found.head.config.norm_before_fc
    assert _noted(found, "norm_before_fc")


def _drop(name: str) -> Change:
    return lambda content, state: state.__delitem__(name)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_drop("d2t"), "d2t: is missing"),
        (_drop("lm_head.weight"), "lm_head.weight"),
        (_drop("midlayer.hidden_norm.weight"), "layers.0.hidden_norm.weight"),
        (lambda c, s: s.update(extra=torch.zeros(1)), "extra"),
        (lambda c, s: s.update({"fc.weight": torch.zeros(2, 2)}), "fc.weight"),
        (lambda c, s: s["norm.weight"].fill_(float("nan")), "norm.weight: is not finite"),
        (lambda c, s: s["d2t"].fill_(VOCAB_SIZE), "d2t: points outside"),
        (lambda c, s: s["t2d"].fill_(False), "t2d: describes another"),
        (lambda c, s: c.update(num_hidden_layers=2), "num_hidden_layers: 2"),
        (lambda c, s: c.update(hidden_act="relu"), "hidden_act: 'relu'"),
        (lambda c, s: c.update(hidden_size="32"), "hidden_size"),
        (lambda c, s: c.update(vocab_size=400), "vocab_size: the head's is 400"),
        (lambda c, s: c.update(num_key_value_heads=3), "num_key_value_heads"),
        (
            lambda c, s: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4, 99]),
            "eagle_aux_hidden_state_layer_ids",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    target: LoadedModel, tmp_path: Path, change: Change, field: str
) -> None:
    folder = _written(_head(target), target, tmp_path / "h", change)
    with pytest.raises(HeadFormatError, match=field):
        import_head(folder, target)


def test_another_model_is_no_head(target: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"model.embed": torch.zeros(1)}, tmp_path / WEIGHTS)
    with pytest.raises(HeadFormatError, match="architectures"):
        import_head(tmp_path, target)


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_exported_is_imported_as_the_same_head(
    target: LoadedModel, tmp_path: Path, to: Any
) -> None:
    head = _head(target)
    export_head(head, {"note": "x"}, tmp_path / "out", target, to, target_name="org/model")
    found = import_head(tmp_path / "out", target).head
    for name, tensor in head.state_dict().items():
        kept = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(found.state_dict()[name], kept), name
    if to == "speculators":
        content = json.loads((tmp_path / "out" / CONFIG).read_text())
        assert content["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    with pytest.raises(HeadFormatError, match="exists already"):
        export_head(head, {}, tmp_path / "out", target, to)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "norm_output"])
def test_what_a_format_cannot_say_is_refused(
    target: LoadedModel, tmp_path: Path, flag: str
) -> None:
    with pytest.raises(HeadFormatError, match=f"{flag}: True cannot be said"):
        export_head(_head(target, **{flag: True}), {}, tmp_path / "out", target, "eagle")
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []


def test_configuration_round_trips_through_its_file(target: LoadedModel) -> None:
    config = _head(target).config
    assert HeadConfig.from_json(config.to_json()) == config
