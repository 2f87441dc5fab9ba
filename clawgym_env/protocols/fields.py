"""Reading fields out of a request's JSON: each reader checks one field and names it when wrong.

It knows nothing of any one protocol. A reader takes the object that holds the field, the field's
name, and ``at``, the path that an error gives (where it is not asked for: the name itself).
Invariant: a reader returns a value of the stated type or raises ``ProtocolError`` with status 400
and ``param`` set. Null counts as absent where a field is optional.
"""

from __future__ import annotations

from typing import Any

import orjson

from clawgym_env.errors import ProtocolError

_SHOWN = 60  # characters of a wrong value that an error repeats


def required(holder: dict[str, Any], field: str, at: str) -> Any:
    """The field's value, whatever it is."""
    if field not in holder:
        message = f"{at!r} is missing; the request must give it"
        raise ProtocolError(400, message, param=at, code="missing_required_parameter")
    return holder[field]


def text(holder: dict[str, Any], field: str, at: str, *, empty: bool = True) -> str:
    """A string that must be there; ``empty`` says whether it may be empty."""
    value = required(holder, field, at)
    if not isinstance(value, str) or not (value or empty):
        raise invalid(at, "a string" if empty else "a string that is not empty", value)
    return value


def mapping(holder: dict[str, Any], field: str, at: str) -> dict[str, Any]:
    """An object that must be there."""
    value = required(holder, field, at)
    if not isinstance(value, dict):
        raise invalid(at, "an object", value)
    return value


def flag(holder: dict[str, Any], field: str, at: str | None = None) -> bool:
    """True or false; false where absent."""
    value = holder.get(field)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(at or field, "true or false", value)


def number(holder: dict[str, Any], field: str, least: float, most: float) -> float | None:
    """A number from ``least`` to ``most``, both allowed; None where absent."""
    value = holder.get(field)
    if value is None:
        return None
    expected = f"a number from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(field, expected, value)
    if not least <= value <= most:
        raise invalid(field, expected, value, code="invalid_value")
    return float(value)


def integer(
    holder: dict[str, Any], field: str, *, least: int | None = None, most: int | None = None
) -> int | None:
    """An integer from ``least`` to ``most``, both allowed; None where absent."""
    value = holder.get(field)
    if value is None:
        return None
    expected = "an integer"
    if least is not None:
        expected += f" of at least {least}" if most is None else f" from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(field, expected, value)
    if (least is not None and value < least) or (most is not None and value > most):
        raise invalid(field, expected, value, code="invalid_value")
    return value


def bounded(value: Any, at: str) -> None:
    """Refuse JSON that is nested too deeply to be written again."""
    try:
        orjson.dumps(value)
    except TypeError as exc:
        message = f"{at!r} is nested too deeply; at most about 250 levels are served"
        raise ProtocolError(400, message, param=at, code="invalid_value") from exc


def invalid(at: str, expected: str, got: Any, *, code: str = "invalid_type") -> ProtocolError:
    """The error for a field that is there and wrong."""
    return ProtocolError(400, f"{at!r} must be {expected}; got {shown(got)}", param=at, code=code)


def shown(value: Any) -> str:
    """A JSON value in a few words; containers by kind alone, for they may be deep or long."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array" if value else "an empty array"
    if isinstance(value, str):
        cut = f"… ({len(value)} characters)" if len(value) > _SHOWN else ""
        return f"{value[:_SHOWN]!r}{cut}"
    return orjson.dumps(value).decode()
