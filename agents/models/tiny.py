"""Very small language models made on the spot: a tokenizer trained on the domain, random weights.

The result is an ordinary Hugging Face directory. This module knows nothing of training the weights.
Invariants: the same texts and settings give the same files; a number is always one token a digit,
and a word's tokens do not depend on the space or quote before it, so that copying a name or number
from one place to another is copying its ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agents.models.directories import written_at_once
from agents.models.quiet import no_progress_bars
from clawgym_env.errors import ConfigError, UnknownNameError

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = Path(__file__).with_name("chatml_tools.jinja")

Size = Literal["200k", "1m", "5m", "30m"]

# hidden size, feed-forward size, layers, query heads, key heads
_SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "200k": (64, 128, 3, 2, 2),
    "1m": (192, 384, 2, 6, 6),
    "5m": (256, 768, 6, 8, 4),
    "30m": (512, 1536, 10, 16, 8),
}
_HEAD_DIM = 32
# Copying a name from far up the conversation is what such a model learns first or not at all.
# Weights this large and positions that turn this fast make it do so within hundreds of
# conversations; with the usual 0.02 and 10,000 it had not learned it in as many.
_INITIAL_STD = 0.1
_ROPE_THETA = 100.0
# Runs of letters, single digits, line breaks, runs of anything else. Letters never join the space
# or punctuation around them, which is what makes a copied word the same ids everywhere.
_PIECES = r"\p{L}+|\p{N}|[\r\n]+|[^\p{L}\p{N}\r\n]+"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 1024, *, context: int = 4096
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with this package's chat template.

    Args:
        texts: The domain's text: conversations as the template renders them, or just their words.
        vocab_size: The most tokens, control tokens and the 256 bytes included; fewer where the
            texts have no more pairs to merge.
        context: The most tokens that the model will read, noted in the tokenizer's settings.

    Raises:
        ConfigError: There is no text, or the vocabulary has no room for bytes and control tokens.
    """
    least = 256 + len(CONTROL_TOKENS) + len(TAGS)
    if vocab_size < least:
        raise ConfigError(
            f"vocab_size is {least} or more (256 bytes and {least - 256} control tokens); got "
            f"{vocab_size}"
        )
    lines = [text for text in texts if text]
    if not lines:
        raise ConfigError("the tokenizer is trained on texts, and none came; give it some episodes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Tags are tokens like any other to skip_special_tokens, or tool calls would vanish from text.
    tokens = [AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS]
    tokens += [AddedToken(t, special=False, normalized=False) for t in TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
    )


def make_tiny(
    texts: Iterable[str],
    directory: str | Path,
    *,
    size: Size = "1m",
    vocab_size: int = 1024,
    context: int = 4096,
    seed: int = 0,
) -> Path:
    """Make a small Qwen3 with random weights and a tokenizer trained on ``texts``.

    Args:
        texts: The domain's text; see ``train_tokenizer``.
        directory: Where to; it may exist only if it is empty.
        size: About how many parameters: ``200k``, ``1m``, ``5m`` or ``30m``.
        vocab_size: The most tokens.
        context: The most tokens that the model reads, prompt and reply together.
        seed: Seed of the weights.

    Returns:
        The directory, loadable with ``CausalPolicy.from_pretrained`` or by Transformers.

    Raises:
        ConfigError: The size is unknown, the directory is in use, or as ``train_tokenizer``.
    """
    if size not in _SHAPES:
        raise UnknownNameError("model size", size, _SHAPES)
    target = Path(directory).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; choose another directory")
    tokenizer = train_tokenizer(texts, vocab_size, context=context)
    hidden, feed_forward, layers, heads, key_heads = _SHAPES[size]
    ids: dict[str, int] = tokenizer.get_vocab()
    turn_end, padding = ids[TURN_END], ids[END_OF_TEXT]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=_HEAD_DIM,
        initializer_range=_INITIAL_STD,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=turn_end,
        pad_token_id=padding,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=[turn_end, padding], pad_token_id=padding, do_sample=True
    )
    with written_at_once(target) as draft, no_progress_bars():
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    return target
