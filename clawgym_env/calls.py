"""The records that pass between the stages: plain frozen dataclasses, no behaviour beyond views.

This module knows nothing of HTTP, tokenizers, sandboxes or learning, and imports nothing of the
package. Everything here is immutable, compares by value and pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
"""Why a reply ended, in OpenAI's terms; every protocol maps from and to these."""

CallKind = Literal["main", "auxiliary"]
"""``auxiliary`` calls (titles, quota probes) are served and captured, not trained on by default."""


class Outcome(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"  # the harness ended by itself with exit status 0
    HARNESS_ERROR = "harness_error"  # the harness ended by itself with another status
    CALL_LIMIT = "call_limit"  # the task's limit on model calls
    TOKEN_LIMIT = "token_limit"  # the task's limit on sampled tokens
    TIME_LIMIT = "time_limit"  # the task's limit on wall time
    START_FAILED = "start_failed"  # the harness ended before its first call
    SANDBOX_ERROR = "sandbox_error"  # the sandbox could not be made or used
    POLICY_ERROR = "policy_error"  # the policy backend failed
    CAPTURE_ERROR = "capture_error"  # the store could not keep a call
    VERIFIER_ERROR = "verifier_error"  # the verifier crashed, hung or printed no score
    CANCELLED = "cancelled"  # the env was closed or reset in the middle

    @property
    def is_infrastructure(self) -> bool:
        """Whether the rollout failed for a reason that says nothing of the policy."""
        return self in _INFRASTRUCTURE

    @property
    def is_truncation(self) -> bool:
        """Whether a limit, not the harness, ended the rollout."""
        return self in (Outcome.CALL_LIMIT, Outcome.TOKEN_LIMIT, Outcome.TIME_LIMIT)


_INFRASTRUCTURE = frozenset(
    {
        Outcome.START_FAILED,
        Outcome.SANDBOX_ERROR,
        Outcome.POLICY_ERROR,
        Outcome.CAPTURE_ERROR,
        Outcome.VERIFIER_ERROR,
        Outcome.CANCELLED,
    }
)


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text in a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message: a ``data:`` or other URL, kept verbatim and never fetched."""

    url: str


ContentPart = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an assistant message.

    Attributes:
        id: The id that the wire carries.
        name: The tool's name.
        arguments: JSON text, exactly as sampled or received; it may fail to parse.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: ``system``, ``developer``, ``user``, ``assistant`` or ``tool``.
        content: Text, parts, or None where the message is tool calls alone.
        reasoning: The model's thinking, kept apart from the content.
        tool_calls: The calls of an assistant message, in order.
        tool_call_id: For a ``tool`` message, the call it answers.
        name: The author's or the tool's name, where the wire gives one.
    """

    role: str
    content: str | tuple[ContentPart, ...] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The content's text parts joined; empty where there are none."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the harness offers: name, description and JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters as the harness asked for them; None where it did not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request at the model boundary, in canonical form.

    Attributes:
        call_id: Unique over all rollouts.
        rollout_id: The rollout it belongs to.
        index: Arrival index within the rollout, from 0.
        protocol: The wire protocol's name, such as ``openai_chat``.
        model: The model name that the harness asked for.
        messages: The whole conversation as sent.
        tools: The tools offered.
        tool_choice: The wire's value (plain JSON), or None.
        sampling: The sampling parameters.
        stream: Whether the reply is wanted as a stream.
        include_usage: Whether a streamed reply ends with a usage chunk.
        kind: ``main`` or ``auxiliary``, told by the harness adapter.
        raw: The request body, byte for byte.
        arrived_at: Unix time in seconds.
    """

    call_id: str
    rollout_id: str
    index: int
    protocol: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: Any = None
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    include_usage: bool = False
    kind: CallKind = "main"
    raw: bytes = b""
    arrived_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """What a policy backend is asked: the call, and its prompt ids where a renderer is set."""

    call: ModelCall
    prompt_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a policy backend answers: token ids, text or a message (the first that is set counts).

    Attributes:
        token_ids: Sampled ids, the stop token included where one was sampled.
        logprobs: Log-probability of each id under the distribution it was sampled from, in nats.
        text: The reply in the model's native text format, tool calls included.
        message: The reply as a structured message.
        finish_reason: ``stop`` or ``length``; ``tool_calls`` is derived from the parsed message.
        policy_version: Version of the weights that produced the reply.
    """

    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    text: str | None = None
    message: Message | None = None
    finish_reason: FinishReason | None = None
    policy_version: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The reply as captured and sent.

    Attributes:
        message: The parsed assistant message.
        finish_reason: Why it ended.
        token_ids: The reply's ids; None where no renderer is set.
        logprobs: One a token id; None where the ids were not sampled (scripted replies).
        policy_version: Version of the weights that produced the reply.
        parse_error: Why the text did not parse as the model's format (it was sent as plain text).
        started_at: Unix time at which the policy was asked, in seconds.
        finished_at: Unix time at which it had answered, in seconds.
    """

    message: Message
    finish_reason: FinishReason
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    policy_version: int = 0
    parse_error: str | None = None
    started_at: float = 0.0
    finished_at: float = 0.0


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A call, its exact prompt and its reply.

    Attributes:
        call: The request.
        completion: The reply.
        prompt_ids: The ids that the reply was sampled after; None where no renderer is set.
        delivered: True once the last byte went to a connected harness, False when it did not,
            None while unknown (committed, confirmation pending).
        parent_id: The call whose prompt and reply are the longest prefix of this prompt.
        extends: Whether the prompt extends the parent's sequence exactly.
        drift: Why a conversation that continued an earlier call does not extend it, else None.
    """

    call: ModelCall
    completion: Completion
    prompt_ids: tuple[int, ...] | None = None
    delivered: bool | None = None
    parent_id: str | None = None
    extends: bool = False
    drift: str | None = None

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and reply ids as one sequence; empty where there are no ids."""
        if self.prompt_ids is None or self.completion.token_ids is None:
            return ()
        return self.prompt_ids + self.completion.token_ids


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a scripted solution, in terms that every harness adapter can translate.

    Attributes:
        kind: ``shell`` runs a command, ``write`` writes a file, ``finish`` ends the task.
        command: The shell command of a ``shell`` move.
        path: The file of a ``write`` move, relative to the workspace.
        content: What a ``write`` move writes, or the final words of a ``finish`` move.
    """

    kind: Literal["shell", "write", "finish"]
    command: str = ""
    path: str = ""
    content: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One harness run on one task.

    Attributes:
        rollout_id: Unique id.
        task_id: The task's id.
        harness: The harness' name.
        outcome: How it ended.
        reward: The verifier's score, or None where there is none (infrastructure failure).
        rewards: The score's breakdown by name.
        calls: The captured calls in arrival order.
        group_id: Rollouts of one (task, harness) sampled together share it.
        seed: The episode's seed.
        policy_version: Version of the weights when the rollout started.
        started_at: Unix time in seconds.
        finished_at: Unix time in seconds.
        detail: One clause on the outcome, such as the error's message or the stderr's tail.
        metadata: Plain JSON values: task level, sandbox, limits in force.
    """

    rollout_id: str
    task_id: str
    harness: str
    outcome: Outcome
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    calls: tuple[CapturedCall, ...] = ()
    group_id: str | None = None
    seed: int | None = None
    policy_version: int = 0
    started_at: float = 0.0
    finished_at: float = 0.0
    detail: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def drift_rate(self) -> float:
        """Share of calls that continued an earlier call but did not extend it token-exactly."""
        continuing = [c for c in self.calls if c.extends or c.drift is not None]
        if not continuing:
            return 0.0
        return sum(c.drift is not None for c in continuing) / len(continuing)
