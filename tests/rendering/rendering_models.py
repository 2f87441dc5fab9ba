"""Small models' text formats for the rendering tests: trained tokenizers, our own templates."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from clawgym_env.calls import Message, Tool, ToolCall
from clawgym_env.rendering import Renderer

CHATML = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
{{- '<tools>' -}}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
{%- set call = call.function -%}
{{- '<tool_call>\\n{"name": ' + (call.name | tojson) + ', "arguments": ' -}}
{{- call.arguments if call.arguments is string else call.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

STRIPS_THINKING = CHATML.replace(
    "{%- for message in messages -%}",
    "{%- set ns = namespace(last=-1) -%}\n"
    "{%- for message in messages -%}\n"
    "{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif -%}\n"
    "{%- endfor -%}\n"
    "{%- for message in messages -%}",
).replace(
    "{%- if message.reasoning_content -%}",
    "{%- if message.reasoning_content and loop.index0 > ns.last -%}",
)

OPENS_THINKING = CHATML.replace(
    "{{ '<|im_start|>assistant\\n' }}{% endif -%}",
    "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}",
)

TRIMS = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if not message.content and not message.tool_calls %}
        {%- continue %}
    {%- endif %}
    {%- generation %}
    {{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] | trim }}
    {%- endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ ({'name': call.function.name, 'arguments': call.function.arguments}
            | tojson(separators=(',', ':'))) ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

STRICT = (
    """\
{%- set ns = namespace(calls=0) -%}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' ~ message.role) -}}
{%- endif -%}
{%- if message.role == 'tool' and ns.calls == 0 -%}
{{- raise_exception('a tool result needs a tool call before it') -}}
{%- endif -%}
{%- if message.role != 'tool' %}{% set ns.calls = message.tool_calls | default([]) | length %}
{%- endif -%}
{%- endfor -%}
"""
    + CHATML
)

COUNTS = STRICT + "{{- '' -}}"
COUNTS = COUNTS.replace(
    "{%- if tools -%}", "{{- messages | length ~ ' messages\\n' -}}\n{%- if tools -%}", 1
)

CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

_SENTENCES = [
    "You are an agent. Find the key in the files and write it to answer.txt.",
    '{"name": "bash", "arguments": {"command": "cat notes/key.txt"}}',
    '{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}',
    "The answer is 42, assistant. I will look at the file first and then finish.",
    "system user assistant tool\nmessages tools function properties string description",
]


@functools.cache
def tokenizer_json(tags_are_tokens: bool = True) -> str:
    """A ByteLevel BPE trained on a few sentences; the tags are single tokens, or ordinary text."""
    control = CONTROL if tags_are_tokens else CONTROL[:3]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in control[:3]],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in control[3:]])
    return str(tokenizer.to_str())


def write_model(
    directory: Path, template: str = CHATML, *, tags_are_tokens: bool = True, **config: object
) -> Path:
    """A model directory as transformers saves it, with the template in its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer_json(tags_are_tokens), "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        **config,
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return directory


def load(directory: Path, template: str = CHATML, **options: bool) -> Renderer:
    return Renderer.from_pretrained(write_model(directory, template, **options))


BASH = Tool(
    "bash",
    "Run a command.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


def system(text: str = "You are an agent.") -> Message:
    return Message("system", text)


def user(text: str = "Find the key.") -> Message:
    return Message("user", text)


def tool(text: str = "total 0", call_id: str = "call_1") -> Message:
    return Message("tool", text, tool_call_id=call_id)


def assistant(text: str | None = None, *commands: str, reasoning: str | None = None) -> Message:
    calls = tuple(
        ToolCall(f"call_{i}", "bash", json.dumps({"command": c})) for i, c in enumerate(commands)
    )
    return Message("assistant", text, reasoning=reasoning, tool_calls=calls)
