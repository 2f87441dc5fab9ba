"""From a policy's reply to the completion that is captured and sent.

It knows replies and the renderer, nothing of HTTP or the store. Invariant: ids that a policy
sampled pass through untouched; ids are made here only for replies that came as text or as a
message, and such replies carry no logprobs.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from typing import TYPE_CHECKING

from clawgym_env.calls import Completion, FinishReason, Message, PolicyRequest, Reply
from clawgym_env.errors import PolicyError

if TYPE_CHECKING:
    from clawgym_env.rendering import Renderer


def to_completion(
    reply: Reply,
    request: PolicyRequest,
    renderer: Renderer | None,
    *,
    started_at: float,
    finished_at: float,
) -> Completion:
    """Read a reply.

    Args:
        reply: What the policy answered; the first of ids, text and message that is set counts.
        request: What it was asked.
        renderer: The rollout's renderer, if it has one.
        started_at: Unix time at which the policy was asked, in seconds.
        finished_at: Unix time at which it had answered, in seconds.

    Raises:
        PolicyError: The reply is none, contradicts itself, or needs a renderer that is not there.
        RenderError: The renderer cannot encode the reply.
    """
    if not isinstance(reply, Reply):
        raise PolicyError(f"a policy must return a Reply; it returned {type(reply).__name__}")
    _check_ids(reply, renderer)
    tools, cut = request.call.tools, reply.finish_reason == "length"
    token_ids = reply.token_ids
    if token_ids is None and renderer is not None:
        token_ids = _encode(reply, renderer, cut=cut)
    error = None
    if reply.token_ids is None and reply.text is None and reply.message is not None:
        message = _with_ids(reply.message)
    elif token_ids is not None:
        # Text goes through its ids too, so that the message is what the ids say.
        assert renderer is not None
        parsed = renderer.parse(token_ids, tools)
        message, error = parsed.message, parsed.error
    elif reply.text is not None:
        from clawgym_env.rendering import parse_text

        parsed = parse_text(reply.text, tools)
        message, error = parsed.message, parsed.error
    else:
        raise PolicyError("the policy's reply has neither token ids nor text nor a message")
    return Completion(
        message=message,
        finish_reason=_finish_reason(reply.finish_reason, message),
        token_ids=token_ids,
        logprobs=reply.logprobs,
        policy_version=reply.policy_version,
        parse_error=error,
        started_at=started_at,
        finished_at=finished_at,
    )


def _check_ids(reply: Reply, renderer: Renderer | None) -> None:
    if reply.token_ids is None:
        if reply.logprobs is not None:
            raise PolicyError(
                "the policy's reply has logprobs but no token ids; give both or neither"
            )
        return
    if renderer is None:
        raise PolicyError(
            "the policy's reply has token ids, but the rollout has no renderer to read them; "
            "give the session a renderer, or reply with text or a message"
        )
    wrong = next((i for i in reply.token_ids if not 0 <= i < renderer.vocab_size), None)
    if wrong is not None:
        raise PolicyError(
            f"the policy's reply holds the token id {wrong}, outside the renderer's vocabulary of "
            f"{renderer.vocab_size}; are policy and renderer of the same model?"
        )
    if reply.logprobs is None:
        return
    if len(reply.logprobs) != len(reply.token_ids):
        raise PolicyError(
            f"the policy's reply has {len(reply.token_ids)} token ids but {len(reply.logprobs)} "
            "logprobs; give one logprob a token"
        )
    if not all(map(math.isfinite, reply.logprobs)):
        raise PolicyError("the policy's reply has logprobs that are not finite numbers")


def _encode(reply: Reply, renderer: Renderer, *, cut: bool) -> tuple[int, ...] | None:
    """Ids of a reply that came as text or as a message; a stop token ends them unless ``cut``."""
    stop_ids = renderer.stop_ids
    if reply.text is not None:
        ids = renderer.encode(reply.text)
        if not cut and not (ids and ids[-1] in stop_ids):
            ids += renderer.encode_reply(Message("assistant", "OK"))[-1:]
        return ids
    if reply.message is None:
        return None
    ids = renderer.encode_reply(_with_ids(reply.message))
    return ids[:-1] if cut else ids


def _with_ids(message: Message) -> Message:
    if message.role != "assistant":
        raise PolicyError(
            f"the policy's reply is a message of role {message.role!r}; it must be 'assistant'"
        )
    if all(call.id for call in message.tool_calls):
        return message
    tool_calls = tuple(
        call if call.id else dataclasses.replace(call, id=f"call_{uuid.uuid4().hex[:24]}")
        for call in message.tool_calls
    )
    return dataclasses.replace(message, tool_calls=tool_calls)


def _finish_reason(given: FinishReason | None, message: Message) -> FinishReason:
    if given in ("length", "content_filter"):
        return given
    return "tool_calls" if message.tool_calls else "stop"
