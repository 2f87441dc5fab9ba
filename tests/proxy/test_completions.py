import math

import pytest

from clawgym_env.calls import (
    Completion,
    FinishReason,
    Message,
    ModelCall,
    PolicyRequest,
    Reply,
    ToolCall,
)
from clawgym_env.errors import PolicyError
from clawgym_env.proxy.completions import to_completion
from clawgym_env.rendering import Renderer

REQUEST = PolicyRequest(
    ModelCall("c", "r", 0, "openai_chat", "clawgym", (Message("user", "hello"),))
)
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'


def convert(reply: Reply, renderer: Renderer | None = None) -> Completion:
    return to_completion(reply, REQUEST, renderer, started_at=1.0, finished_at=2.0)


def test_sampled_ids_pass_through_untouched(renderer: Renderer) -> None:
    ids = (*renderer.encode(f"Hm.\n{CALL}"), renderer.stop_ids[0])
    logprobs = tuple(-0.001 * i for i in range(len(ids)))
    completion = convert(Reply(token_ids=ids, logprobs=logprobs, policy_version=7), renderer)
    assert (completion.token_ids, completion.logprobs) == (ids, logprobs)
    assert (completion.policy_version, completion.finish_reason) == (7, "tool_calls")
    assert (completion.started_at, completion.finished_at) == (1.0, 2.0)
    (call,) = completion.message.tool_calls
    assert (call.name, call.arguments) == ("bash", '{"command":  "ls"}')
    assert completion.message.content == "Hm."


def test_text_gets_the_ids_of_that_very_text(renderer: Renderer) -> None:
    completion = convert(Reply(text=CALL), renderer)
    assert completion.token_ids is not None and completion.logprobs is None
    assert renderer.decode(completion.token_ids) == f"{CALL}<|im_end|>"
    assert completion.message.tool_calls[0].name == "bash"
    again = convert(Reply(text=f"{CALL}<|im_end|>"), renderer)
    assert again.token_ids == completion.token_ids


def test_text_that_was_cut_short_gets_no_stop_token(renderer: Renderer) -> None:
    completion = convert(Reply(text="I will", finish_reason="length"), renderer)
    assert renderer.decode(completion.token_ids or ()) == "I will"
    assert completion.finish_reason == "length"


def test_a_message_gets_the_ids_the_model_would_sample(renderer: Renderer) -> None:
    message = Message("assistant", "Hm.", tool_calls=(ToolCall("call_1", "bash", "{}"),))
    completion = convert(Reply(message=message), renderer)
    assert completion.message == message
    assert completion.token_ids == renderer.encode_reply(message)
    assert completion.logprobs is None
    cut = convert(Reply(message=message, finish_reason="length"), renderer)
    assert cut.token_ids == renderer.encode_reply(message)[:-1]
    assert cut.finish_reason == "length"


def test_text_that_does_not_parse_goes_out_as_text(renderer: Renderer) -> None:
    broken = "<tool_call>\nnot json\n</tool_call>"
    for known in (renderer, None):
        completion = convert(Reply(text=broken), known)
        assert completion.message.tool_calls == ()
        assert completion.message.text == broken
        assert completion.parse_error is not None
        assert completion.finish_reason == "stop"


def test_without_a_renderer_there_are_no_ids() -> None:
    completion = convert(Reply(text=CALL))
    assert completion.token_ids is None
    assert completion.message.tool_calls[0].name == "bash"
    completion = convert(Reply(message=Message("assistant", "hi")))
    assert (completion.token_ids, completion.message.content) == (None, "hi")


def test_tool_calls_without_an_id_get_one() -> None:
    calls = (ToolCall("", "bash", "{}"), ToolCall("mine", "bash", "{}"), ToolCall("", "ls", "{}"))
    message = convert(Reply(message=Message("assistant", None, tool_calls=calls))).message
    first, mine, last = (call.id for call in message.tool_calls)
    assert mine == "mine"
    assert first != last and first.startswith("call_") and len(first) == 29


@pytest.mark.parametrize(
    ("given", "with_calls", "expected"),
    [
        (None, False, "stop"),
        ("stop", False, "stop"),
        ("tool_calls", False, "stop"),
        ("content_filter", False, "content_filter"),
        ("length", False, "length"),
        (None, True, "tool_calls"),
        ("stop", True, "tool_calls"),
        ("length", True, "length"),
    ],
)
def test_finish_reasons(given: FinishReason | None, with_calls: bool, expected: str) -> None:
    calls = (ToolCall("x", "bash", "{}"),) if with_calls else ()
    reply = Reply(message=Message("assistant", "hi", tool_calls=calls), finish_reason=given)
    assert convert(reply).finish_reason == expected


def test_replies_that_cannot_be_captured(renderer: Renderer) -> None:
    with pytest.raises(PolicyError, match="no renderer"):
        convert(Reply(token_ids=(1, 2)))
    with pytest.raises(PolicyError, match="3 token ids but 2 logprobs"):
        convert(Reply(token_ids=(1, 2, 3), logprobs=(-0.1, -0.2)), renderer)
    with pytest.raises(PolicyError, match="not finite"):
        convert(Reply(token_ids=(1,), logprobs=(math.nan,)), renderer)
    with pytest.raises(PolicyError, match="logprobs but no token ids"):
        convert(Reply(text="x", logprobs=(-0.1,)), renderer)
    for wrong in (-1, renderer.vocab_size):
        with pytest.raises(PolicyError, match=f"token id {wrong}, outside"):
            convert(Reply(token_ids=(1, wrong)), renderer)
    with pytest.raises(PolicyError, match="neither token ids nor text nor a message"):
        convert(Reply())
    with pytest.raises(PolicyError, match="role 'user'"):
        convert(Reply(message=Message("user", "x")))
    with pytest.raises(PolicyError, match="must return a Reply; it returned str"):
        convert("text")  # type: ignore[arg-type]
