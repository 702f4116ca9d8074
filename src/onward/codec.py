"""Codec: turns the arguments and the result of a call into JSON text and back.

The rule: a value arrives equal and of the same type, or the call is refused at the caller's line
with the path of the culprit (`user`, `items[3].price`, `options['a']`). Nothing changes silently.

It is kept by trying: a call is encoded, decoded by the very decoder that the worker will use, and
what arrived is compared with what was given. So whatever the annotations can express survives
(dates, sets, dataclasses, enums, msgspec Structs, pydantic models …), and whatever JSON would bend
without them is refused. The documented exceptions, each towards what was declared:

- an int where `float` is declared arrives as the float, if it is exactly equal (PEP 484);
- an aware datetime keeps its instant and its offset; a zone's name does not travel;
- in a result, a tuple arrives as a list wherever the annotation does not say tuple;
- a dataclass, Struct or model is its fields: other attributes do not travel.

Defaults are not stored: they are evaluated when the job runs. An annotation that JSON cannot
express (`str | UUID`, a `Protocol`) may be declared; such a parameter takes plain JSON values only.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import datetime as dt
import enum
import functools
import inspect
import itertools
import math
import re
import sys
import types
import typing
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeAlias, cast

import msgspec

from onward.errors import (
    InvalidArguments,
    InvalidOption,
    NotSerializable,
    OnwardError,
    PayloadTooLarge,
    PayloadUnreadable,
)

MAX_BYTES = 16 * 1024 * 1024
"""Largest stored arguments, and largest stored result, of one job."""

MAX_DEPTH = 128
"""Deepest nesting of containers in one argument or result."""

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


# ---------------------------------------------------------------------------- the front


class Signature:
    """How calls of one task are stored: made once when the task is declared, then only used."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name = name
        self._function = function
        self._plan: _Plan | None = None

    @classmethod
    def of(cls, fn: Callable[..., Any], name: str) -> Signature:
        """Read the signature and annotations of `fn`.

        Names that do not exist yet (a forward reference, a circular import) are looked up again at
        the first use.

        Raises:
            InvalidOption: an annotation can never be resolved.
        """
        signature = cls(fn, name)
        try:
            signature._plan = _compile(fn)
        except (NameError, AttributeError):
            pass  # Perhaps defined further down; `_ready` tries again and then raises.
        except Exception as error:
            raise _unresolved(fn, name, error) from error
        return signature

    def encode_arguments(self, args: Args, kwargs: Mapping[str, Any]) -> str:
        """Write the arguments of a call as a JSON object by parameter name.

        Raises:
            InvalidArguments: the call does not fit the signature or its annotations.
            NotSerializable: a value would not arrive as what it is.
            PayloadTooLarge: the arguments are larger or deeper than what is stored.
        """
        plan = self._plan or self._ready()
        try:
            bound = self._bind(plan, args, kwargs)
            return self._write(plan, bound)
        except OnwardError:
            _close_coroutines(itertools.chain(args, kwargs.values()))
            raise

    def decode_arguments(self, text: str) -> tuple[Args, Kwargs]:
        """Read stored arguments, ready for `fn(*args, **kwargs)`; fresh objects at every call.

        Raises:
            PayloadUnreadable: the text does not fit the signature as it is today.
        """
        plan = self._plan or self._ready()
        try:
            values = msgspec.structs.astuple(plan.decoder.decode(text))
        except Exception as error:
            raise self._unreadable("arguments", plan.decoder, text, error) from _cause(error)
        if plan.simple:
            return (), {n: v for n, v in zip(plan.names, values, strict=True) if v is not _UNSET}
        return self._spread(plan, dict(zip(plan.names, values, strict=True)))

    def encode_result(self, value: object) -> str:
        """Write what the task returned.

        Raises:
            NotSerializable: the value would not arrive as what it is, or contradicts `-> …`.
            PayloadTooLarge: the result is larger or deeper than what is stored.
        """
        plan = self._plan or self._ready()
        try:
            return self._write_result(plan, value)
        except OnwardError:
            _close_coroutines((value,))
            raise

    def decode_result(self, text: str) -> Any:
        """Read a stored result.

        Raises:
            PayloadUnreadable: the text does not fit the return annotation as it is today.
        """
        plan = self._plan or self._ready()
        try:
            return plan.result_decoder.decode(text)
        except Exception as error:
            raise self._unreadable("result", plan.result_decoder, text, error) from _cause(error)

    # ------------------------------------------------------------------------ binding

    def _ready(self) -> _Plan:
        try:
            self._plan = _compile(self._function)
        except Exception as error:
            raise _unresolved(self._function, self.name, error) from error
        return self._plan

    def _bind(self, plan: _Plan, args: Args, kwargs: Mapping[str, Any]) -> Kwargs:
        if plan.simple and len(args) <= len(plan.positional):
            given = dict(zip(plan.positional, args, strict=False))
            given.update(kwargs)
            clash = len(given) != len(args) + len(kwargs)
            if not clash and plan.required <= given.keys() <= plan.known:
                return {name: given[name] for name in plan.names if name in given}
        return self._bind_slowly(plan, args, kwargs)

    def _bind_slowly(self, plan: _Plan, args: Args, kwargs: Mapping[str, Any]) -> Kwargs:
        """Leave the finer points, and the wording of what is wrong, to the standard library."""
        try:
            return plan.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InvalidArguments(
                f"cannot enqueue {_call(self.name, kwargs, self._named(plan, args))}",
                why=f"{clean_text(str(error), 200)}; given: {_given(args, kwargs)}",
                fix=f"the task expects {self.name}{_expected(plan)}",
            ) from None

    def _named(self, plan: _Plan, args: Args) -> list[tuple[str, Any]]:
        """Positional arguments with the names they would get, so that secrets are known as such."""
        unplaced = plan.rest or next(filter(is_secret, plan.names), "")
        return list(itertools.zip_longest(plan.positional[: len(args)], args, fillvalue=unplaced))

    def _spread(self, plan: _Plan, values: Kwargs) -> tuple[Args, Kwargs]:
        """Sort stored values into the places of a call; all before a filled `*args` by position."""
        rest = values.pop(plan.rest, _UNSET) if plan.rest else _UNSET
        options = values.pop(plan.options, _UNSET) if plan.options else _UNSET
        before = plan.positional if rest is not _UNSET and rest else plan.positional_only
        args = [values.pop(name) for name in before]
        while args and args[-1] is _UNSET and not rest:
            args.pop()
        if _UNSET in args:
            gap = before[args.index(_UNSET)]
            raise PayloadUnreadable(
                f"stored arguments do not fit {self.name}",
                why=f"argument `{gap}` is missing, and later positional ones are there",
                fix=_UNREADABLE_FIX,
            )
        kwargs = {name: value for name, value in values.items() if value is not _UNSET}
        if options is not _UNSET:
            self._refuse_double(plan, options)
            kwargs.update(options)
        return (*args, *(rest or ())), kwargs

    def _refuse_double(self, plan: _Plan, options: Mapping[str, Any]) -> None:
        taken = plan.known - set(plan.positional_only) - {plan.rest, plan.options}
        for name in options:
            if name in taken:
                raise PayloadUnreadable(
                    f"stored arguments do not fit {self.name}",
                    why=f"`{plan.options}` holds {safe_repr(name)}, which is a parameter by now",
                    fix=_UNREADABLE_FIX,
                )

    # ------------------------------------------------------------------------ writing

    def _write(self, plan: _Plan, bound: Kwargs) -> str:
        try:
            raw = _ENCODER.encode(bound)
        except Exception as error:
            culprit = _first_flaw(bound) or _odd(bound, error).under("arguments")
            raise self._refused(plan, bound, culprit) from _cause(error)
        if len(raw) > MAX_BYTES:
            largest = max(bound, key=lambda name: len(_ENCODER.encode(bound[name])))
            subject = f"argument `{largest}` is the largest of the arguments, which take"
            raise self._too_large(f"cannot enqueue {self.name}", subject, len(raw))
        try:
            record = plan.decoder.decode(raw)
        except Exception as error:
            raise self._misfit(plan, bound, raw, error) from _cause(error)
        received = zip(plan.names, msgspec.structs.astuple(record), strict=True)
        flaw = _compare_arguments(bound, dict(received))
        if flaw is not None:
            raise self._refused(plan, bound, flaw)
        return raw.decode()

    def _write_result(self, plan: _Plan, value: object) -> str:
        what = f"cannot store the result of {self.name}"
        try:
            raw = _ENCODER.encode(value)
        except Exception as error:
            culprit = _unwritable(value) or _odd(value, error)
            raise culprit.under("result").error_for(what, "the") from _cause(error)
        if len(raw) > MAX_BYTES:
            raise self._too_large(what, "it takes", len(raw))
        try:
            received = plan.result_decoder.decode(raw)
        except Exception as error:
            raise self._result_misfit(plan, what, value, raw, error) from _cause(error)
        flaw = _compare_safely(value, received, tuples_as_lists=True)
        if flaw is not None:
            raise flaw.under("result").error_for(what, "the")
        return raw.decode()

    # ------------------------------------------------------------------------ refusing

    def _refused(self, plan: _Plan, bound: Kwargs, flaw: Flaw) -> OnwardError:
        note = plan.notes.get(_first_name(flaw.path), "")
        if note:
            flaw = dataclasses.replace(flaw, fix=f"{flaw.fix} ({note})")
        return flaw.error_for(f"cannot enqueue {_call(self.name, bound)}", "argument")

    def _misfit(self, plan: _Plan, bound: Kwargs, raw: bytes, error: Exception) -> OnwardError:
        """Say why the worker could not read the call: a value bent by JSON, or a wrong type."""
        flaw = _first_flaw(bound)
        if flaw is not None:
            return self._refused(plan, bound, flaw)
        path, reason = _locate(plan.decoder, raw, error)
        return InvalidArguments(
            f"cannot enqueue {_call(self.name, bound)}",
            why=f"argument `{path}` does not fit its annotation: {reason}",
            fix=f"the task expects {self.name}{_expected(plan)}",
        )

    def _result_misfit(
        self, plan: _Plan, what: str, value: object, raw: bytes, error: Exception
    ) -> OnwardError:
        flaw = _unwritable(value)
        if flaw is not None:
            return flaw.under("result").error_for(what, "the")
        path, reason = _locate(plan.result_decoder, raw, error)
        declared = _spell(plan.signature.return_annotation)
        where = "the value" if not path else f"`result{_joined(path)}`"
        return NotSerializable(
            what,
            why=f"{where} does not fit the declared `-> {declared}`: {reason}",
            fix="correct the annotation or what the task returns",
        )

    def _too_large(self, what: str, subject: str, size: int) -> OnwardError:
        return PayloadTooLarge(
            what,
            why=f"{subject} {size:,} bytes of JSON; at most {MAX_BYTES:,} are stored for one job",
            fix="keep large data in a file or a table and pass its name or id",
        )

    def _unreadable(
        self, noun: str, decoder: msgspec.json.Decoder[Any], text: str, error: Exception
    ) -> OnwardError:
        raw = text.encode(errors="surrogatepass")
        path, reason = _locate(decoder, raw, error)
        if noun == "result":
            why = f"`result{_joined(path)}`: {reason}"
        else:
            why = f"argument `{path}`: {reason}" if path else reason
        return PayloadUnreadable(
            f"stored {noun} {'does' if noun == 'result' else 'do'} not fit {self.name}",
            why=why,
            fix=_UNREADABLE_FIX,
        )


_UNREADABLE_FIX = "deploy code that still reads them, then requeue the job; or discard it"


# ---------------------------------------------------------------------------- the plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is known about a task once its annotations are resolved."""

    signature: inspect.Signature
    names: tuple[str, ...]
    known: frozenset[str]
    required: frozenset[str]
    positional: tuple[str, ...]
    positional_only: tuple[str, ...]
    rest: str
    options: str
    simple: bool
    """No `*args`, no `**kwargs`, nothing positional-only: binding is a matter of two sets."""
    notes: dict[str, str]
    decoder: msgspec.json.Decoder[Any]
    result_decoder: msgspec.json.Decoder[Any]


def _compile(function: Callable[..., Any]) -> _Plan:
    signature = inspect.signature(function)
    hints = _hints(function)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    notes: dict[str, str] = {}
    for index, parameter in enumerate(signature.parameters.values()):
        kind, note = _field_type(parameter, hints.get(parameter.name, Any))
        if note:
            notes[parameter.name] = note
        required = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        fields.append((f"p{index}", kind) if required else (f"p{index}", kind, _UNSET))
    return _plan(signature, fields, notes, hints.get("return", Any))


def _plan(
    signature: inspect.Signature,
    fields: list[tuple[str, Any] | tuple[str, Any, Any]],
    notes: dict[str, str],
    returned: Any,
) -> _Plan:
    parameters = signature.parameters
    result_type, _ = _supported(_awaited(returned))
    # The fields have names of their own, since `self` or `__class__` may be a parameter's.
    record = msgspec.defstruct(
        "Arguments",
        fields,
        kw_only=True,
        forbid_unknown_fields=True,
        rename={f"p{index}": name for index, name in enumerate(parameters)},
    )
    return _Plan(
        signature=signature,
        names=tuple(parameters),
        known=frozenset(parameters),
        required=frozenset(
            name for name, field in zip(parameters, fields, strict=True) if len(field) == 2
        ),
        positional=_named(signature, inspect.Parameter.POSITIONAL_ONLY)
        + _named(signature, inspect.Parameter.POSITIONAL_OR_KEYWORD),
        positional_only=_named(signature, inspect.Parameter.POSITIONAL_ONLY),
        rest="".join(_named(signature, inspect.Parameter.VAR_POSITIONAL)),
        options="".join(_named(signature, inspect.Parameter.VAR_KEYWORD)),
        simple=all(p.kind in _SIMPLE for p in parameters.values()),
        notes=notes,
        decoder=msgspec.json.Decoder(record, dec_hook=_read_foreign),
        result_decoder=msgspec.json.Decoder(result_type, dec_hook=_read_foreign),
    )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SIMPLE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_UNSET: Any = msgspec.UNSET


def _named(signature: inspect.Signature, kind: object) -> tuple[str, ...]:
    return tuple(name for name, p in signature.parameters.items() if p.kind is kind)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    annotated: Any = inspect.unwrap(function)
    while hasattr(annotated, "func"):  # functools.partial
        annotated = annotated.func
    if not hasattr(annotated, "__annotations__") and not inspect.isclass(annotated):
        annotated = type(annotated).__call__
    return typing.get_type_hints(annotated, include_extras=True)


def _field_type(parameter: inspect.Parameter, hint: Any) -> tuple[Any, str]:
    """The type to decode a parameter to, and a note when its annotation cannot serve."""
    unpacked = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Unpack else None
    if unpacked is not None:
        return _supported(unpacked)
    kind, note = _supported(hint)
    if parameter.kind is parameter.VAR_POSITIONAL:
        return types.GenericAlias(tuple, (kind, ...)), note
    if parameter.kind is parameter.VAR_KEYWORD:
        return types.GenericAlias(dict, (str, kind)), note
    return kind, note


def _supported(hint: Any) -> tuple[Any, str]:
    try:
        msgspec.json.Decoder(hint, dec_hook=_read_foreign)
    except (TypeError, ValueError) as error:
        reason = re.split(r" - type| \(", str(error), maxsplit=1)[0]
        return Any, f"its annotation `{_spell(hint)}` cannot be used to read JSON: {_lower(reason)}"
    return hint, ""


def _awaited(hint: Any) -> Any:
    """`def f() -> Awaitable[int]` returns an int, as far as the task's caller is concerned."""
    origin = typing.get_origin(hint)
    awaitable = origin in (collections.abc.Awaitable, collections.abc.Coroutine)
    return typing.get_args(hint)[-1] if awaitable else hint


def _unresolved(function: Callable[..., Any], name: str, error: Exception) -> OnwardError:
    missing = str(getattr(error, "name", "") or "")
    texts: Mapping[str, object] = getattr(function, "__annotations__", {})
    blamed = [
        f"`{where}: {text}`"
        for where, text in texts.items()
        if isinstance(text, str) and missing and missing in text
    ]
    return InvalidOption(
        f"cannot use {name} as a task: its signature cannot be read",
        why=f"{', '.join(blamed) or 'its annotations'}: {clean_text(str(error), 200)}",
        fix="import or define the name at module level (not under `if TYPE_CHECKING:`)",
    )


# ---------------------------------------------------------------------------- foreign types


def _is_pydantic(kind: type) -> bool:
    """Whether this is a pydantic model; if it is, somebody else has imported pydantic."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and pydantic.BaseModel in _mro(kind)


def _write_foreign(value: Any) -> object:
    if _is_pydantic(_kind(value)):
        return msgspec.Raw(value.model_dump_json(by_alias=True, round_trip=True).encode())
    raise TypeError(f"a {type_name(_kind(value))} has no JSON form")


def _read_foreign(kind: Any, value: Any) -> object:
    """Make a model from plain JSON values; msgspec puts the path to a TypeError or ValueError."""
    if isinstance(kind, type) and _is_pydantic(kind):
        return _read_pydantic(kind, value)
    return value  # msgspec checks what comes back against the type, and refuses it.


def _read_pydantic(kind: Any, value: object) -> object:
    try:
        # As JSON, since a strict model takes a date as text from there only.
        return kind.model_validate_json(msgspec.json.encode(value))
    except ValueError as error:
        problems: Any = getattr(error, "errors", None)
        if problems is None:
            raise
        # pydantic's own text would quote the value, which may be a secret.
        first = problems()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else str(first["msg"])) from None


_ENCODER = msgspec.json.Encoder(enc_hook=_write_foreign)


# ---------------------------------------------------------------------------- comparing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Where and why a value would not arrive as it is; `path` is built from the inside out."""

    why: str
    fix: str
    path: str = ""
    kind: type[OnwardError] = NotSerializable
    quotes: bool = False
    """Whether `why` quotes the value, which may be a secret."""

    def under(self, step: str) -> Flaw:
        return dataclasses.replace(self, path=step + self.path)

    def error_for(self, what: str, noun: str) -> OnwardError:
        hidden = self.quotes and is_secret(self.path)
        why = "would not arrive as it is" if hidden else self.why
        return self.kind(what, why=f"{noun} `{_short(self.path)}` {why}", fix=self.fix)


def _compare_arguments(bound: Kwargs, received: Kwargs) -> Flaw | None:
    for name, value in bound.items():
        flaw = _compare_safely(value, received[name])
        if flaw is not None:
            return flaw.under(name)
    return None


def _compare_safely(
    sent: object, received: object, *, tuples_as_lists: bool = False
) -> Flaw | None:
    try:
        return _compare(sent, received, 0, tuples_as_lists)
    except RecursionError:
        return _too_deep("nests deeper than the stack that is left here")
    except Exception as error:  # A user's __eq__ or property.
        return _odd(sent, error)


def _compare(sent: object, received: object, depth: int, loose: bool) -> Flaw | None:
    """The first difference between what was sent and what would be received, if any."""
    kind = type(sent)
    if kind is not type(received) and not _may_become(sent, received, loose):
        return _changed(sent, received)
    if kind in _SCALARS:
        return None if sent == received else _changed(sent, received)
    if kind is list or kind is tuple:
        if depth >= MAX_DEPTH:
            return _too_deep()
        return _compare_items(sent, received, depth + 1, loose)
    if kind is dict:
        if depth >= MAX_DEPTH:
            return _too_deep()
        return _compare_entries(sent, received, depth + 1, loose)
    return _compare_objects(sent, received, depth, loose)


_SCALARS = frozenset(
    {int, str, bool, type(None), float, bytes, bytearray, dt.date, dt.timedelta, uuid.UUID}
)


def _may_become(sent: Any, received: Any, loose: bool) -> bool:
    """The changes that are allowed, each towards what was declared (see the top of the module)."""
    if type(sent) is int:
        return type(received) is float  # Whether they are equal is compared next.
    return loose and type(sent) is tuple and type(received) is list


def _compare_items(sent: Any, received: Any, depth: int, loose: bool) -> Flaw | None:
    if len(sent) != len(received):
        return _changed(sent, received)
    for index, item in enumerate(sent):
        flaw = _compare(item, received[index], depth, loose)
        if flaw is not None:
            return flaw.under(f"[{index}]")
    return None


def _compare_entries(sent: Any, received: Any, depth: int, loose: bool) -> Flaw | None:
    """JSON keeps the order of entries, so keys are compared in step."""
    if len(sent) != len(received):
        return _lost_entry(sent, received)
    for (key, value), (other_key, other) in zip(sent.items(), received.items(), strict=True):
        if type(key) is not str or key != other_key:
            flaw = _compare(key, other_key, depth, loose)
            if flaw is not None:
                return _bad_key(key, flaw.why)
        flaw = _compare(value, other, depth, loose)
        if flaw is not None:
            return flaw.under(_step(key))
    return None


def _lost_entry(sent: dict[Any, Any], received: dict[Any, Any]) -> Flaw:
    """Two keys became one (`1` and `'1'`), or the declared type has no such key."""
    kept = {(_kind(key), key) for key in received}
    lost = next(key for key in sent if (_kind(key), key) not in kept)
    if type(lost) is not str:
        return _bad_key(lost, "would not be kept apart from the others")
    fix = "pass only keys that the declared type has, each once"
    return Flaw(path=_step(lost), why="would be lost", fix=fix)


def _bad_key(key: object, why: str) -> Flaw:
    return Flaw(path=_step(key), why=f"has a key that {why}", fix=_KEY_FIX)


_KEY_FIX = "keys of JSON are strings: annotate the place (`dict[int, …]`), or pass string keys"


def _compare_objects(sent: Any, received: Any, depth: int, loose: bool) -> Flaw | None:
    kind = _kind(sent)
    if kind is set or kind is frozenset:
        return _compare_sets(sent, received, depth, loose)
    if kind is dt.datetime or kind is dt.time:
        return None if _same_time(sent, received) else _changed(sent, received)
    if kind is Decimal:
        # Exactly: 1.10 is not 1.1, and NaN is NaN.
        same = sent.as_tuple() == received.as_tuple()
        return None if same else _changed(sent, received)
    fields = None if issubclass(kind, enum.Enum) else _fields(sent)
    if fields is None:
        return None if sent is received or sent == received else _changed(sent, received)
    if depth >= MAX_DEPTH:
        return _too_deep()
    return _compare_fields(fields, dict(_fields(received) or ()), depth + 1, loose)


def _compare_sets(sent: Any, received: Any, depth: int, loose: bool) -> Flaw | None:
    others = {item: item for item in received}
    if len(sent) != len(others):
        return _changed(sent, received)
    for item in sent:
        if item not in others or _compare(item, others[item], depth + 1, loose):
            return _changed(sent, received)
    return None


def _compare_fields(
    ours: list[tuple[str, Any]], theirs: Mapping[str, Any], depth: int, loose: bool
) -> Flaw | None:
    for name, value in ours:
        flaw = _compare(value, theirs.get(name, _MISSING), depth, loose)
        if flaw is not None:
            return flaw.under(f".{name}")
    return None


def _same_time(sent: Any, received: Any) -> bool:
    """The same reading of the clock at the same offset; a zone comes back as that offset."""
    if (sent.tzinfo is None) != (received.tzinfo is None):
        return False
    if sent.tzinfo is None and sent.fold != received.fold:
        return False
    same_clock = sent.replace(tzinfo=None, fold=0) == received.replace(tzinfo=None, fold=0)
    return bool(same_clock and sent.utcoffset() == received.utcoffset())


_MISSING = object()


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a dataclass, Struct, NamedTuple, attrs or pydantic object, or None."""
    kind = _kind(value)
    if _is_pydantic(kind):
        return [*value.__dict__.items(), *(value.__pydantic_extra__ or {}).items()]
    names = _field_names(cast(Any, kind))
    if names is None:
        return None
    return [(name, getattr(value, name, _MISSING)) for name in names]


@functools.lru_cache(maxsize=1024)
def _field_names(kind: type) -> tuple[str, ...] | None:
    if msgspec.Struct in _mro(kind):
        return cast("tuple[str, ...]", cast(Any, kind).__struct_fields__)
    if _has(kind, "__dataclass_fields__"):
        return tuple(field.name for field in dataclasses.fields(kind))
    if tuple in _mro(kind) and _has(kind, "_fields"):
        return cast("tuple[str, ...]", cast(Any, kind)._fields)
    if _has(kind, "__attrs_attrs__"):
        return tuple(field.name for field in cast(Any, kind).__attrs_attrs__)
    return None


def _has(kind: type, attribute: str) -> bool:
    """Whether a class has an attribute; its metaclass is not asked."""
    return any(attribute in type.__dict__["__dict__"].__get__(base) for base in _mro(kind))


def _kind(value: object) -> type[object]:
    return type(value)


def _mro(kind: type) -> tuple[type, ...]:
    return cast("tuple[type, ...]", type.__dict__["__mro__"].__get__(kind))


# ---------------------------------------------------------------------------- finding the culprit


def _first_flaw(bound: Kwargs) -> Flaw | None:
    for name, value in bound.items():
        flaw = _unwritable(value)
        if flaw is not None:
            return flaw.under(name)
    return None


def _unwritable(value: object) -> Flaw | None:
    """The first part of a value that has no JSON form at all."""
    try:
        return _search(value, 0, ())
    except RecursionError:
        return _too_deep("nests deeper than the stack that is left here")
    except Exception as error:  # A property of the user's, or another thread changes the value.
        return _odd(value, error)


def _search(value: Any, depth: int, above: tuple[int, ...]) -> Flaw | None:
    if id(value) in above:
        return _too_deep("contains itself")
    parts = _parts(value)
    if parts is None:
        return _unwritable_leaf(value)
    if depth >= MAX_DEPTH:
        return _too_deep()
    for step, part in parts:
        flaw = _search(part, depth + 1, (*above, id(value)))
        if flaw is not None:
            return flaw.under(step)
    return _unwritable_key(value) if dict in _mro(_kind(value)) else None


def _parts(value: Any) -> Iterator[tuple[str, Any]] | None:
    kind = _kind(value)
    if dict in _mro(kind):
        return ((_step(key), part) for key, part in value.items())
    fields = _fields(value)
    if fields is not None:
        return ((f".{name}", part) for name, part in fields)
    if not _ITERABLE.isdisjoint(_mro(kind)):
        return ((f"[{index}]", item) for index, item in enumerate(value))
    return None


_ITERABLE = frozenset({list, tuple, set, frozenset})


def _unwritable_key(value: dict[Any, Any]) -> Flaw | None:
    for key in value:
        try:
            _ENCODER.encode({key: None})
        except Exception:
            surrogate = type(key) is str
            return _bad_key(key, _SURROGATE_WHY if surrogate else f"is {_a(_kind(key))}")
    return None


def _unwritable_leaf(value: Any) -> Flaw | None:
    if type(value) is float and not math.isfinite(value):
        return _not_finite(value)
    try:
        _ENCODER.encode(value)
    except Exception as error:
        return _without_form(value, error)
    return None


def _without_form(value: Any, error: Exception) -> Flaw:
    kind = _kind(value)
    if kind is str:
        return Flaw(why=_SURROGATE_WHY, fix=_SURROGATE_FIX)
    if kind is int:
        return Flaw(
            why=f"is {safe_repr(value)}, more digits than Python itself reads from text",
            fix="pass it as hexadecimal text",
        )
    if _is_pydantic(kind):
        return _odd(value, error)
    return Flaw(
        why=f"is {_a(kind)}; what a job is called with and returns is stored as JSON",
        fix=_advice(value),
    )


_SURROGATE_WHY = "is a text with a lone surrogate, which is not valid Unicode"
_SURROGATE_FIX = "pass bytes, or decode the text with errors='replace'"


def _changed(sent: Any, received: Any) -> Flaw:
    if type(sent) is float and not math.isfinite(sent):
        return _not_finite(sent)
    if type(sent) is type(received):
        why = f"is {safe_repr(sent)} and would arrive as {safe_repr(received)}"
        fix = "pass it in a form that JSON keeps, such as a string"
        return Flaw(why=why, fix=fix, quotes=True)
    why = f"is {_a(_kind(sent))} and would arrive as {_a(_kind(received))}"
    return Flaw(why=why, fix=_advice(sent))


def _not_finite(value: float) -> Flaw:
    return Flaw(
        why=f"is {value!r}, and JSON has no such number",
        fix="pass None (annotate `float | None`), or the number as a Decimal or string",
    )


def _too_deep(why: str = f"nests deeper than {MAX_DEPTH} levels") -> Flaw:
    return Flaw(why=why, fix="pass flatter data", kind=PayloadTooLarge)


def _odd(value: object, error: Exception) -> Flaw:
    return Flaw(
        why=f"is {_a(_kind(value))} and cannot be written and read again: {_said(error)}",
        fix=_advice(value),
        quotes=True,
    )


def _advice(value: Any) -> str:
    kind = _kind(value)
    if kind is types.CoroutineType:
        return "await it first and pass its result; to enqueue a call, use `task.enqueue(…)`"
    if any(module_of(base).partition(".")[0] == "numpy" for base in _mro(kind)):
        return "pass a Python value: `.item()` of a scalar, `.tolist()` of an array"
    if kind in _EXAMPLES:
        return f"annotate the place, for example `{_EXAMPLES[kind]}`, or pass a list"
    if kind in _ANNOTATED or kind in _PLAIN or _is_declarable(kind):
        return f"annotate the place with `{type_name(kind)}`"
    for base in _PLAIN:
        if base in _mro(kind):
            return f"pass the plain `{base.__name__}`: a subclass is not kept"
    return "pass plain data, such as an id, and load the object in the job"


def _is_declarable(kind: type) -> bool:
    structured = _is_pydantic(kind) or _field_names(cast(Any, kind)) is not None
    return structured or enum.Enum in _mro(kind)


_EXAMPLES: dict[type, str] = {
    tuple: "tuple[int, ...]",
    set: "set[int]",
    frozenset: "frozenset[int]",
}
_ANNOTATED = frozenset(
    {bytes, bytearray, dt.date, dt.datetime, dt.time, dt.timedelta, Decimal, uuid.UUID}
)
_PLAIN = (str, int, float, bytes, dict, list, tuple, set, frozenset, dt.datetime, dt.date)


# ---------------------------------------------------------------------------- paths


def _locate(decoder: msgspec.json.Decoder[Any], raw: bytes, error: Exception) -> tuple[str, str]:
    """Where and why a text does not fit: the path (`items[3].price`, or nothing) and the reason."""
    if _cause(error) is not None:
        return "", _said(error)
    message = clean_text(str(error), 300)
    named = re.search(r"field `(.*)`$", message)
    if named and " - at " not in message:
        return named[1], "missing" if "missing" in message else "no such parameter"
    reason, _, place = message.rpartition(" - at ")
    found = re.search(r"`\$(.*)`$", place)
    if found is None:
        return "", _lower(message)
    steps = _STEP.findall(found[1]) + (["[...]"] if place.startswith("`key`") else [])
    path = "".join(_pinpoint(decoder, raw, steps)).removeprefix(".")
    if is_secret(path):
        reason = "the value has the wrong form"
    return path, _lower(f"{reason}, as a key" if place.startswith("`key`") else reason)


_STEP = re.compile(r"\.[^.\[]+|\[\d+\]|\[\.\.\.\]")


def _pinpoint(decoder: msgspec.json.Decoder[Any], raw: bytes, steps: list[str]) -> list[str]:
    """Replace each `[...]`, as msgspec says for a value of a dict, by the key that is to blame."""
    try:
        document: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):  # Also spoilt further on.
        return steps
    node, path = document, list[str]()
    for step in steps:
        if step == "[...]" and isinstance(node, dict):
            entries = cast("dict[str, Any]", node)
            key = _blamed_key(decoder, document, entries)
            path.append(_step(key))
            node = entries[key]
            continue
        path.append(step)
        try:
            node = node[int(step[1:-1]) if step.startswith("[") else step[1:]]
        except (LookupError, TypeError, ValueError):
            return [*path, *steps[len(path) :]]
    return path


def _blamed_key(decoder: msgspec.json.Decoder[Any], document: Any, node: dict[str, Any]) -> str:
    """Halve a dict inside the document until one entry is left that still does not decode."""
    entries = list(node.items())
    while len(entries) > 1:
        half = entries[: len(entries) // 2]
        node.clear()
        node.update(half)
        entries = half if _fails(decoder, document) else entries[len(half) :]
    node.clear()
    node.update(entries)
    return entries[0][0]


def _fails(decoder: msgspec.json.Decoder[Any], document: object) -> bool:
    try:
        decoder.decode(msgspec.json.encode(document))
    except Exception:
        return True
    return False


def _step(key: object) -> str:
    return f"[{safe_repr(key, 40)}]"


def _short(path: str) -> str:
    return clean_text(path if len(path) <= 100 else path[:99] + "…", 200)


def _joined(path: str) -> str:
    return path if not path or path.startswith("[") else f".{path}"


def _first_name(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _cause(error: Exception) -> Exception | None:
    """An error of the user's own code is kept as the cause; msgspec's adds nothing to ours."""
    ours = (msgspec.MsgspecError, UnicodeError, RecursionError)
    return None if isinstance(error, ours) or type(error) is TypeError else error


# ---------------------------------------------------------------------------- words of an error


def _call(name: str, kwargs: Mapping[str, Any], args: Iterable[tuple[str, Any]] = ()) -> str:
    shown = [_shown(place, value) for place, value in args]
    shown += [f"{clean_text(key, 60)}={_shown(key, value)}" for key, value in kwargs.items()]
    inside = ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "")
    return f"{name}({inside})"


def _shown(name: str, value: object) -> str:
    return "***" if is_secret(name) else safe_repr(value, 40)


def _given(args: Args, kwargs: Mapping[str, Any]) -> str:
    words = [f"{len(args)} positional"] if args else []
    words += [f"`{clean_text(name, 60)}`" for name in itertools.islice(kwargs, 8)]
    return ", ".join(words) or "no arguments"


def _expected(plan: _Plan) -> str:
    """The signature, spelt without calling the `repr` of any default."""
    shown = [
        p.replace(
            default=p.default if p.default is p.empty else _Ellipsis(),
            annotation=p.annotation if p.annotation is p.empty else _Spelt(_spell(p.annotation)),
        )
        for p in plan.signature.parameters.values()
    ]
    return clean_text(str(inspect.Signature(shown)), 400)


class _Ellipsis:
    def __repr__(self) -> str:
        return "…"


class _Spelt(str):
    """An annotation that `inspect` prints as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _spell(annotation: object) -> str:
    if isinstance(annotation, str):
        return clean_text(annotation, 120)
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return type_name(annotation)
    try:
        return clean_text(inspect.formatannotation(annotation), 120)
    except Exception:
        return "…"


def _a(kind: type) -> str:
    if kind is type(None):
        return "None"
    if kind is bytes:
        return "bytes"
    name = type_name(kind)
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"


def _said(error: BaseException) -> str:
    try:
        return clean_text(f"{type_name(type(error))}: {error}", 300)
    except Exception:
        return type_name(type(error))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _close_coroutines(values: Iterable[object], depth: int = 3) -> None:
    """Close coroutines that will never be awaited, so that Python does not warn about them too."""
    for value in values:
        kind = type(value)
        if kind is types.CoroutineType:
            with contextlib.suppress(Exception):  # It may be running.
                cast("types.CoroutineType[Any, Any, Any]", value).close()
        elif depth and kind is dict:
            _close_coroutines(cast("dict[Any, Any]", value).values(), depth - 1)
        elif depth and kind in (list, tuple):
            _close_coroutines(cast("list[Any]", value), depth - 1)


# ---------------------------------------------------------------------------- safe text

_SECRET = re.compile(
    r"passw|pwd|secret|token|api_?key|private_?key|access_?key|authori[sz]ation|credential|cookie",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a parameter, key or path looks as if its value should not be shown."""
    return _SECRET.search(name) is not None


def type_name(kind: type) -> str:
    """`module.Qualname`, builtins without the module; a metaclass has no say in it."""
    module = module_of(kind)
    name = _plain_text(type.__dict__["__qualname__"].__get__(kind))
    return clean_text(name if module in ("builtins", "") else f"{module}.{name}", 200)


def module_of(kind: type) -> str:
    """The name of the module that defines a class, whatever its metaclass says."""
    try:
        return _plain_text(type.__dict__["__module__"].__get__(kind))
    except AttributeError:
        return ""


def _plain_text(value: object) -> str:
    """An exact str: a subclass may have methods of its own."""
    return str.__str__(cast(str, value)) if issubclass(type(value), str) else ""


def safe_repr(value: object, limit: int = 80) -> str:
    """A short text for a value, for messages.

    Never runs code of the value's class (a `__repr__` may raise, block or tell a secret), and shows
    entries whose key looks secret as `***`.
    """
    try:
        text = _render(value, limit, 3)
    except Exception:  # Changed by another thread meanwhile.
        text = f"<{type_name(type(value))} object>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _render(value: Any, limit: int, depth: int) -> str:
    kind = _kind(value)
    if kind in (str, bytes, bytearray):
        return repr(value[: limit + 1])
    if kind is int and value.bit_length() > 256:
        return f"<int of {value.bit_length():,} bits>"
    if kind in _HARMLESS or (kind in _TIMES and type(value.tzinfo) in _ZONES):
        return repr(value)
    if kind is dict:
        return _render_dict(value, limit, depth)
    if kind in _BRACKETS:
        opened, closed = _BRACKETS[kind]
        closed = ",)" if kind is tuple and len(value) == 1 else closed
        return opened + _render_items(value, limit, depth) + closed
    if enum.Enum in _mro(kind):
        return f"{type_name(kind)}.{object.__getattribute__(value, '_name_')}"
    return f"<{type_name(kind)} object>"


_HARMLESS = frozenset(
    {int, float, bool, complex, type(None), Decimal, uuid.UUID, dt.date, dt.timedelta}
)
_TIMES = frozenset({dt.datetime, dt.time})
_ZONES = frozenset({type(None), dt.timezone, zoneinfo.ZoneInfo})
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}


def _render_items(value: Any, limit: int, depth: int) -> str:
    if depth == 0:
        return "…"
    shown = [_render(item, limit, depth - 1) for item in itertools.islice(value, 6)]
    return ", ".join(shown + (["…"] if len(value) > 6 else []))


def _render_dict(value: dict[Any, Any], limit: int, depth: int) -> str:
    if depth == 0:
        return "{…}"
    shown = [
        f"{_render(key, limit, 1)}: "
        + ("***" if type(key) is str and is_secret(key) else _render(part, limit, depth - 1))
        for key, part in itertools.islice(value.items(), 6)
    ]
    return "{" + ", ".join(shown + (["…"] if len(value) > 6 else [])) + "}"


_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def clean_text(text: str, limit: int) -> str:
    """Make a text that every database, log and terminal takes, of at most `limit` characters.

    NUL, other control characters (but not newline and tab) and lone surrogates become visible
    escapes (`\\x00`, `\\ud800`). A longer text is cut in the middle, and says by how much.
    """
    if len(text) <= limit:
        escaped = _UNSAFE.sub(_escape, text)
        if len(escaped) <= limit:
            return escaped
    marker = f" […{len(text):,} characters cut…] "  # As long as the real one, or longer.
    room = max(limit - len(marker), 0)
    head = _take(text[:room], room - room // 2)
    tail = _take(text[::-1][:room] if len(text) <= room else text[: -room - 1 : -1], room // 2)
    shown = _UNSAFE.sub(_escape, head)
    ending = _UNSAFE.sub(_escape, tail[::-1])
    cut = f" […{len(text) - len(head) - len(tail):,} characters cut…] "
    return (shown + cut + ending)[:limit]


def _take(text: str, room: int) -> str:
    """As many characters from the start as fit into `room` once they are escaped."""
    for index, character in enumerate(text):
        room -= len(_UNSAFE.sub(_escape, character))
        if room < 0:
            return text[:index]
    return text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
