"""Messages to token ids and back, with sampled ids kept as they were sampled.

    loading.py      a model directory -> tokenizer, chat template, stop tokens
    tokens.py       text <-> ids, control tokens told from text that looks like them
    chat.py         messages and tools -> what chat templates read
    template.py     the Jinja chat template -> text
    meaning.py      when two messages say the same
    parsing.py      reply text -> message (Hermes tool calls, thinking)
    replies.py      reply ids -> message, by the model's tags as tokens
    splice.py       a rendered conversation cut where sampled turns go in
    drift.py        why a conversation does not extend the call it continued
    conversation.py one rollout's sampled turns, spliced into each new prompt
    renderer.py     all of it for one model

This package knows nothing of HTTP, policies or learning, and never imports transformers. Its
invariant: a turn that the rollout sampled enters later prompts as exactly the ids that were
sampled, or the prompt says why not.
"""

from clawgym_env.rendering.conversation import Conversation, RenderedPrompt
from clawgym_env.rendering.parsing import ParsedReply, parse_text
from clawgym_env.rendering.renderer import Renderer

__all__ = ["Conversation", "ParsedReply", "RenderedPrompt", "Renderer", "parse_text"]
