"""Policies over local model directories: loading, saving, refusing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from agents.models.directories import written_at_once
from agents.models.policy import CausalPolicy, LoraSettings
from clawgym_env.calls import Message
from clawgym_env.errors import ConfigError, RenderError


def weights(policy: CausalPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.model.state_dict().items()}


def disturb(policy: CausalPolicy) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    policy.updated()


def copy_of(directory: Path, target: Path) -> Path:
    return Path(shutil.copytree(directory, target))


def test_a_policy_joins_model_renderer_and_version(policy: CausalPolicy) -> None:
    assert policy.version == 0
    assert policy.context_length == 512
    trained, total = policy.parameter_counts()
    assert trained == total == sum(p.numel() for p in policy.parameters())
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    ids = policy.renderer.render((Message("user", "hello"),), ())
    assert max(ids) < policy.base.config.vocab_size
    assert (policy.updated(), policy.version) == (1, 1)


def test_saved_and_loaded_it_is_the_same(policy: CausalPolicy, tmp_path: Path) -> None:
    disturb(policy)
    policy.save(tmp_path / "saved")
    disturb(policy)
    policy.save(tmp_path / "saved")  # an own directory is replaced
    loaded = CausalPolicy.load(tmp_path / "saved")
    assert loaded.version == 2
    assert loaded.renderer.fingerprint == policy.renderer.fingerprint
    assert loaded.renderer.stop_ids == policy.renderer.stop_ids
    expected = weights(policy)
    for name, tensor in weights(loaded).items():
        assert torch.equal(tensor, expected[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    # It is an ordinary model directory too.
    assert CausalPolicy.from_pretrained(tmp_path / "saved").version == 0


def test_adapters_are_saved_alone_and_loaded_onto_their_base(
    tiny_directory: Path, tmp_path: Path
) -> None:
    base = copy_of(tiny_directory, tmp_path / "base")
    settings = LoraSettings(rank=4, alpha=8, targets=("q_proj", "v_proj"))
    policy = CausalPolicy.from_pretrained(base, lora=settings)
    trained, total = policy.parameter_counts()
    assert 0 < trained < total / 10
    disturb(policy)
    policy.save(tmp_path / "adapters")
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    loaded = CausalPolicy.load(tmp_path / "adapters")
    assert (loaded.version, loaded.lora) == (1, settings)
    assert loaded.parameter_counts() == (trained, total)
    expected = weights(policy)
    for name, tensor in weights(loaded).items():
        assert torch.equal(tensor, expected[name])
    with pytest.raises(ConfigError, match="load them with CausalPolicy.load"):
        CausalPolicy.from_pretrained(tmp_path / "adapters")
    shutil.rmtree(base)
    with pytest.raises(ConfigError, match=f"adapters of the model at {base}, which is gone"):
        CausalPolicy.load(tmp_path / "adapters")


def test_another_tokenizer_is_noticed(policy: CausalPolicy, tmp_path: Path) -> None:
    policy.save(tmp_path / "saved")
    template = tmp_path / "saved" / "chat_template.jinja"
    template.write_text(template.read_text().replace("Tools:", "Functions:"))
    with pytest.raises(ConfigError, match="saved at .* belongs to another tokenizer"):
        CausalPolicy.load(tmp_path / "saved")
    with pytest.raises(ConfigError, match="^the store belongs to another tokenizer"):
        policy.check_fingerprint("0123", "the store")


def test_half_precision_with_adapters_in_single(tiny_directory: Path) -> None:
    policy = CausalPolicy.from_pretrained(tiny_directory, dtype="bfloat16", lora=LoraSettings())
    assert policy.base.dtype == torch.bfloat16
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


def test_other_peoples_directories_are_left_alone(policy: CausalPolicy, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no saved policy; it is left alone"):
        policy.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(
        ConfigError, match="holds no saved policy .* use CausalPolicy.from_pretrained"
    ):
        CausalPolicy.load(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "local directories only: download it first .hf download"),
        ("no/such/place", "'no/such/place' does not exist; .* clawgym model get smollm2"),
        ("smollm2", "'smollm2' does not exist"),
    ],
)
def test_names_that_are_no_directories(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CausalPolicy.from_pretrained(path)


def test_directories_that_are_no_models(tiny_directory: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_directory, tmp_path / "model")
    with pytest.raises(ConfigError, match="is a file; give the directory that holds config.json"):
        CausalPolicy.from_pretrained(model / "config.json")
    (model / "chat_template.jinja").unlink()
    with pytest.raises(RenderError, match="has no chat template"):
        CausalPolicy.from_pretrained(model)
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json is missing"):
        CausalPolicy.from_pretrained(model)


def test_weights_that_do_not_load(tiny_directory: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_directory, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "t5"}))
    with pytest.raises(ConfigError, match="does not load as a causal LM"):
        CausalPolicy.from_pretrained(model)
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(ConfigError, match="does not load as a causal LM"):
        CausalPolicy.from_pretrained(model)
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match="does not load as a causal LM"):
        CausalPolicy.from_pretrained(model)
    deeper = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    (model / "config.json").write_text(json.dumps({**config, **deeper}))
    with pytest.raises(ConfigError, match="lacks 11 of its model's weights, model.layers.3"):
        CausalPolicy.from_pretrained(model)
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="does not load as a causal LM"):
        CausalPolicy.from_pretrained(model)


def test_settings_that_cannot_be_met(tiny_directory: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is one of float32.*; got 'int8'"):
        CausalPolicy.from_pretrained(tiny_directory, dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device 'abacus' cannot be used"):
        CausalPolicy.from_pretrained(tiny_directory, device="abacus")
    with pytest.raises(ConfigError, match="LoRA adapters .*nothing.* cannot be made"):
        CausalPolicy.from_pretrained(tiny_directory, lora=LoraSettings(targets=("nothing",)))


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with written_at_once(target) as draft:
        (draft / "file").write_text("first")
        assert not target.exists()
    with pytest.raises(RuntimeError), written_at_once(target) as draft:
        (draft / "file").write_text("second")
        raise RuntimeError
    assert (target / "file").read_text() == "first"
    with written_at_once(target) as draft:
        (draft / "other").write_text("third")
    assert [path.name for path in target.iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
