"""Every error that clawgym raises on purpose, in one tree.

    ClawgymError
    ├── ConfigError            a setting, id or argument of the user's is wrong
    │   └── UnknownNameError   a name that is not registered (carries the near name)
    ├── HarnessError
    │   ├── HarnessNotInstalledError
    │   └── HarnessStartError  the harness died before its first model call
    ├── SandboxError
    │   └── SandboxUnavailableError   this machine lacks what the backend needs
    ├── TaskError
    │   └── VerifierError      the verifier crashed, hung or printed no score
    ├── PolicyError            the policy backend could not answer a call
    ├── RenderError            the chat template or tokenizer refused a conversation
    ├── CaptureError           the capture store could not keep a call
    └── ProtocolError          a request that gets its protocol's own error reply

Each message says what was expected, what came and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ClawgymError(Exception):
    """Base of every error that clawgym raises on purpose."""


class ConfigError(ClawgymError):
    """A setting, id or argument given by the user is wrong."""


class UnknownNameError(ConfigError):
    """A name that is not registered.

    Args:
        kind: What the name should have named, such as ``"harness"``.
        name: The name that came.
        known: The names that would have been accepted.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = sorted(known)
        super().__init__(f"unknown {kind} {name!r}{near(name, self.known)}")


class HarnessError(ClawgymError):
    """A harness could not be installed, configured or run."""


class HarnessNotInstalledError(HarnessError):
    """The harness is known but not installed on this machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"harness {name!r} is not installed; install it with: clawgym harness install {name}"
        )


class HarnessStartError(HarnessError):
    """The harness ended before its first model call.

    Args:
        name: The harness.
        returncode: Its exit status, or None when it was killed by a limit.
        stderr_tail: The last part of what it wrote to standard error.
        why: What happened, in one clause.
    """

    def __init__(self, name: str, returncode: int | None, stderr_tail: str, why: str) -> None:
        self.name = name
        self.returncode = returncode
        self.stderr_tail = stderr_tail
        super().__init__(f"harness {name!r} {why}")


class SandboxError(ClawgymError):
    """A sandbox could not be made, used or removed."""


class SandboxUnavailableError(SandboxError):
    """This machine lacks what the sandbox backend needs."""


class TaskError(ClawgymError):
    """A task or task set is malformed."""


class VerifierError(TaskError):
    """The verifier crashed, hung or printed no score: an infrastructure failure, never reward 0."""


class PolicyError(ClawgymError):
    """The policy backend could not answer a call."""


class RenderError(ClawgymError):
    """The chat template or the tokenizer refused a conversation."""


class CaptureError(ClawgymError):
    """The capture store could not keep or find a record."""


class ProtocolError(ClawgymError):
    """A request that gets its protocol's own error reply.

    Args:
        status: HTTP status code.
        message: What was expected, what came, what to do.
        param: The request field at fault, if one is.
        code: The protocol's machine-readable code, such as ``"model_not_found"``.
        kind: The protocol's error type, such as ``"invalid_request_error"``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        super().__init__(message)


def near(name: str, known: Iterable[str]) -> str:
    """The clause that suggests a near name, or lists what is known when nothing is near."""
    options = sorted(known)
    folded = {option.lower(): option for option in reversed(options)}
    match = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=0.6)
    if match:
        return f"; did you mean {folded[match[0]]!r}?"
    return f"; known: {', '.join(options)}" if options else "; none is registered"
