"""A tiny language model with its tokenizer, made once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_runs import small_run_settings
from tiny_texts import texts
from transformers import AutoModelForCausalLM

from agents.engine import Engine
from agents.models.policy import CausalPolicy
from agents.models.tiny import make_tiny
from agents.runs import RunResult, execute

# Models this small spend their time waiting for a second thread, above all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are large enough that its distribution is far from uniform."""
    directory = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(texts(), directory, size="200k", vocab_size=400, context=512, seed=1)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A whole run like the demo, at a size that takes seconds: ReAct, sampled calls, two steps."""
    return execute(tmp_path_factory.mktemp("run") / "small", small_run_settings())


@pytest.fixture
def policy(tiny_directory: Path) -> CausalPolicy:
    return CausalPolicy.from_pretrained(tiny_directory, device="cpu")


@pytest.fixture
def engine(policy: CausalPolicy) -> Iterator[Engine]:
    with Engine(policy) as engine:
        yield engine
