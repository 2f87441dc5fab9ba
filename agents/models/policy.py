"""A causal language model as a policy: weights, tokenizer and version together.

It wraps any Hugging Face causal LM from a local directory, with LoRA where asked. It knows nothing
of sampling (the engine), losses or optimisers (the trainers). Invariants: ``version`` counts the
weight updates, so equal versions of one run mean equal weights; a policy is saved whole (its
directory is never seen half-written) and loaded with the tokenizer it was saved with.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from agents.models.directories import written_at_once
from agents.models.quiet import no_progress_bars
from clawgym_env.errors import ConfigError, PolicyError
from clawgym_env.rendering import Renderer

_RECORD = "clawgym_policy.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Train low-rank adapters instead of the weights themselves.

    Attributes:
        rank: Rank of each adapter.
        alpha: Scale; the adapter's output is multiplied by ``alpha / rank``.
        dropout: Dropout on the adapter's input while training.
        targets: Names of the modules to adapt, or ``("all-linear",)`` for every linear layer but
            the output's.
    """

    rank: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)

    def config(self) -> LoraConfig:
        """The same in peft's terms."""
        targets = "all-linear" if self.targets == ("all-linear",) else list(self.targets)
        return LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=targets,
        )


class CausalPolicy:
    """A causal LM with its renderer and the version of its weights.

    Attributes:
        model: The Transformers model, or the peft model around it; trainers call this one.
        renderer: Messages to ids and back, by the model's own tokenizer and chat template.
        version: How many times the weights were updated; see ``updated``.
        lora: The adapters' settings, or None when all weights are trained.
        source: The directory that the base weights came from.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        renderer: Renderer,
        *,
        source: Path,
        lora: LoraSettings | None = None,
        version: int = 0,
    ) -> None:
        self.model = model
        self.renderer = renderer
        self.source = source
        self.lora = lora
        self.version = version

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: DType = "float32",
        lora: LoraSettings | None = None,
        device: str = "auto",
    ) -> CausalPolicy:
        """Load a model in Hugging Face form from a local directory; its version is 0.

        Args:
            path: A directory with config.json, safetensors, tokenizer.json and a chat template.
            dtype: Type of the weights; adapters are float32 whatever this is.
            lora: Train adapters with these settings instead of all weights.
            device: A torch device, or ``auto``: CUDA where there is one, else the CPU.

        Raises:
            ConfigError: The path is not such a directory, or the dtype or device is unknown.
            RenderError: There is no chat template, or the tokenizer cannot be read.
        """
        directory = model_directory(path)
        renderer = Renderer.from_pretrained(directory)
        model = _load_model(directory, dtype, device)
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, torch.Tensor)
        rows = len(embedding)
        if renderer.vocab_size > rows:
            raise ConfigError(
                f"{directory}: the tokenizer has {renderer.vocab_size} tokens but the model embeds "
                f"{rows}; the two are not of one model"
            )
        wrapped = model if lora is None else _with_adapters(model, lora)
        return cls(wrapped, renderer, source=directory, lora=lora)

    @classmethod
    def load(
        cls, path: str | Path, *, dtype: DType = "float32", device: str = "auto"
    ) -> CausalPolicy:
        """Load what ``save`` wrote, adapters and version included, ready to be trained on.

        Raises:
            ConfigError: The directory is missing or was not written by ``save``, the base model of
                saved adapters is gone, or the tokenizer is not the one the policy was saved with.
        """
        directory = Path(path).expanduser()
        record_path = directory / _RECORD
        if not record_path.is_file():
            raise ConfigError(
                f"{directory} holds no saved policy ({_RECORD} is missing); to start from a plain "
                f"Hugging Face directory use CausalPolicy.from_pretrained"
            )
        record = json.loads(record_path.read_text())
        if record["lora"] is None:
            policy = cls.from_pretrained(directory, dtype=dtype, device=device)
        else:
            base = Path(record["base"])
            if not base.is_dir():
                raise ConfigError(
                    f"{directory} holds adapters of the model at {base}, which is gone; put that "
                    f"model back there (clawgym model get NAME for the known ones)"
                )
            settings = {**record["lora"], "targets": tuple(record["lora"]["targets"])}
            policy = cls.from_pretrained(base, dtype=dtype, device=device)
            policy.lora = LoraSettings(**settings)
            with _peft_warnings():
                policy.model = PeftModel.from_pretrained(
                    policy.base, str(directory), is_trainable=True, local_files_only=True
                )
        policy.version = record["version"]
        policy.check_fingerprint(record["fingerprint"], f"the policy saved at {directory}")
        return policy

    def save(self, path: str | Path) -> None:
        """Write the policy to a directory, replacing what an earlier ``save`` wrote there.

        A policy without adapters is saved as a complete Hugging Face directory; adapters are saved
        alone, with the path of their base model.

        Raises:
            ConfigError: The directory exists and was not written by ``save``.
        """
        directory = Path(path).expanduser().absolute()
        if directory.exists() and any(directory.iterdir()) and not (directory / _RECORD).is_file():
            raise ConfigError(
                f"{directory} exists and holds no saved policy; it is left alone: choose a new "
                f"directory or empty this one"
            )
        record = {
            "version": self.version,
            "fingerprint": self.renderer.fingerprint,
            "lora": None if self.lora is None else asdict(self.lora),
            "base": str(self.source.absolute()),
        }
        with written_at_once(directory) as draft, no_progress_bars():
            self.model.save_pretrained(str(draft))
            if self.lora is None:
                for name in _TOKENIZER_FILES:
                    if (self.source / name).is_file():
                        shutil.copyfile(self.source / name, draft / name)
            (draft / _RECORD).write_text(json.dumps(record, indent=2) + "\n")

    def updated(self) -> int:
        """Count a weight update; trainers call it after each optimiser step.

        Returns:
            The new version.
        """
        self.version += 1
        return self.version

    def check_fingerprint(self, fingerprint: str, what: str) -> None:
        """Make sure that token ids made elsewhere mean the same here.

        Args:
            fingerprint: The tokenizer's and template's fingerprint there.
            what: What the ids or weights belong to, for the message.

        Raises:
            ConfigError: The fingerprints differ.
        """
        if fingerprint != self.renderer.fingerprint:
            raise ConfigError(
                f"{what} belongs to another tokenizer or chat template (fingerprint "
                f"{fingerprint}) than the model at {self.source} ({self.renderer.fingerprint}); "
                f"use them with the model directory that they were made with"
            )

    @property
    def base(self) -> PreTrainedModel:
        """The Transformers model itself, without peft's wrapper; adapters stay in place."""
        model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        assert isinstance(model, PreTrainedModel)
        return model

    @property
    def context_length(self) -> int:
        """The most tokens, prompt and reply together, that the model was made for."""
        length = getattr(self.base.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(length, int):
            raise PolicyError(
                f"{self.source}: config.json names no max_position_embeddings; give the engine a "
                f"max_context"
            )
        return length

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.base.device

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters to train: the adapters with LoRA, else all."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def parameter_counts(self) -> tuple[int, int]:
        """How many parameters are trained, and how many there are."""
        total = sum(parameter.numel() for parameter in self.model.parameters())
        return sum(parameter.numel() for parameter in self.parameters()), total


def _with_adapters(model: PreTrainedModel, lora: LoraSettings) -> PeftModel:
    try:
        with _peft_warnings():
            wrapped = get_peft_model(model, lora.config())
    except ValueError as error:
        raise ConfigError(f"LoRA adapters with {lora} cannot be made: {error}") from error
    assert isinstance(wrapped, PeftModel)
    return wrapped


@contextmanager
def _peft_warnings() -> Iterator[None]:
    """A block in which peft may ask Transformers for a name that is on its way out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        yield


def model_directory(path: str | Path) -> Path:
    """The directory, once it is seen to hold a whole model in Hugging Face form.

    Raises:
        ConfigError: It does not; the message says what is missing and how to get it.
    """
    directory = Path(path).expanduser()
    if not directory.exists():
        text = str(path)
        if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.startswith("."):
            raise ConfigError(
                f"{text!r} is no local directory, and models are loaded from local directories "
                f"only: download it first (hf download {text} --local-dir DIR) and give that DIR"
            )
        raise ConfigError(
            f"model directory {text!r} does not exist; give the local directory of a Hugging Face "
            f"causal LM, or get a known one with: clawgym model get smollm2"
        )
    if not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give the directory that holds config.json")
    if (directory / "adapter_config.json").is_file():
        raise ConfigError(f"{directory} holds LoRA adapters; load them with CausalPolicy.load")
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ConfigError(f"{directory} is no model directory: {name} is missing")
    return directory


def _load_model(directory: Path, dtype: str, device: str) -> PreTrainedModel:
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is one of {', '.join(_DTYPES)}; got {dtype!r}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=_DTYPES[dtype], local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ConfigError(f"{directory} does not load as a causal LM: {error}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{directory} lacks {len(missing)} of its model's weights, {missing[0]} among them; "
            f"fetch or save the model again"
        )
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used: {error}") from error
    assert isinstance(model, PreTrainedModel)
    return model
