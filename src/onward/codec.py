"""Codec: turns the arguments and the result of a call into JSON text and back.

The rule: a value arrives equal and of the same type, or the call is refused at the caller's line
with the path of the culprit. It is kept by trying: a call is encoded, decoded by the very decoder
that the worker will use, and what arrived is compared with what was given (see `faithful`). So
whatever the annotations can express survives, and whatever JSON would bend without them is refused.
An annotation that JSON cannot express (`str | UUID`, a `Protocol`) may be declared; such a
parameter takes plain JSON values only. Defaults are not stored: they are evaluated in the job.
"""

from __future__ import annotations

import collections.abc
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from onward.errors import InvalidArguments, NotSerializable, OnwardError
from onward.faithful import Flaw, compare_arguments, compare_safely, first_flaw, odd, unwritable
from onward.foreign import ENCODER, close_coroutines, read_foreign
from onward.misfit import (
    at_hand,
    cause_of,
    first_name,
    in_python,
    joined,
    locate,
    lower_first,
    spell,
    spell_call,
    spell_given,
    spell_signature,
    too_large,
    unreadable,
    unresolved,
)
from onward.store.stored import is_no_text
from onward.text import clean_text, is_secret, safe_repr

MAX_BYTES = 16 * 1024 * 1024
"""Largest stored arguments, and largest stored result, of one job."""

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


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
            raise unresolved(fn, name, error) from error
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
            close_coroutines(itertools.chain(args, kwargs.values()))
            raise

    def decode_arguments(self, text: str) -> tuple[Args, Kwargs]:
        """Read stored arguments, ready for `fn(*args, **kwargs)`; fresh objects at every call.

        Raises:
            PayloadUnreadable: the text does not fit the signature as it is today.
        """
        plan = self._plan or self._ready()
        try:
            record = plan.decoder.decode(text)
        except Exception as error:
            path, reason = _located(plan.decoder, text, error)
            why = f"argument `{path}`: {reason}" if path else reason
            raise unreadable(self.name, why) from cause_of(error)
        values = dict(zip(plan.names, msgspec.structs.astuple(record), strict=True))
        if not plan.simple:
            return self._spread(plan, values)
        if len(plan.required) < len(plan.names):
            values = {name: value for name, value in values.items() if value is not _UNSET}
        return (), values

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
            close_coroutines((value,))
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
            path, reason = _located(plan.result_decoder, text, error)
            why = f"`result{joined(path)}`: {reason}"
            raise unreadable(self.name, why, noun="result") from cause_of(error)

    # ------------------------------------------------------------------------ binding

    def _ready(self) -> _Plan:
        try:
            self._plan = _compile(self._function)
        except Exception as error:
            raise unresolved(self._function, self.name, error) from error
        return self._plan

    def _bind(self, plan: _Plan, args: Args, kwargs: Mapping[str, Any]) -> Kwargs:
        if plan.simple and not kwargs and len(args) == len(plan.names) == len(plan.positional):
            return dict(zip(plan.names, args, strict=True))
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
                f"cannot enqueue {spell_call(self.name, kwargs, self._named(plan, args))}",
                why=f"{clean_text(str(error), 200)}; given: {spell_given(args, kwargs)}",
                fix=f"the task expects {self.name}{spell_signature(plan.signature)}",
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
            why = f"argument `{gap}` is missing, and later positional ones are there"
            raise unreadable(self.name, why)
        kwargs = {name: value for name, value in values.items() if value is not _UNSET}
        if options is not _UNSET:
            self._refuse_double(plan, options)
            kwargs.update(options)
        return (*args, *(rest or ())), kwargs

    def _refuse_double(self, plan: _Plan, options: Mapping[str, Any]) -> None:
        taken = plan.known - set(plan.positional_only) - {plan.rest, plan.options}
        for name in options:
            if name in taken:
                why = f"`{plan.options}` holds {safe_repr(name)}, which is a parameter by now"
                raise unreadable(self.name, why)

    # ------------------------------------------------------------------------ writing

    def _write(self, plan: _Plan, bound: Kwargs) -> str:
        try:
            raw = ENCODER.encode(bound)
        except Exception as error:
            culprit = first_flaw(bound) or odd(bound, error).under("arguments")
            raise self._refused(plan, bound, culprit) from cause_of(error)
        if len(raw) > MAX_BYTES:
            largest = max(bound, key=lambda name: len(ENCODER.encode(bound[name])))
            subject = f"argument `{largest}` is the largest of the arguments, which take"
            raise too_large(f"cannot enqueue {self.name}", subject, len(raw), MAX_BYTES)
        try:
            record = plan.decoder.decode(raw)
        except Exception as error:
            raise self._misfit(plan, bound, raw, error) from cause_of(error)
        flaw = compare_arguments(bound, plan.names, msgspec.structs.astuple(record))
        if flaw is not None:
            raise self._refused(plan, bound, flaw)
        return raw.decode()

    def _write_result(self, plan: _Plan, value: object) -> str:
        what = f"cannot store the result of {self.name}"
        try:
            raw = ENCODER.encode(value)
        except Exception as error:
            culprit = unwritable(value) or odd(value, error)
            raise culprit.under("result").error_for(what, "the") from cause_of(error)
        if len(raw) > MAX_BYTES:
            raise too_large(what, "it takes", len(raw), MAX_BYTES)
        try:
            received = plan.result_decoder.decode(raw)
        except Exception as error:
            raise self._result_misfit(plan, what, value, raw, error) from cause_of(error)
        flaw = compare_safely(value, received, tuples_as_lists=True)
        if flaw is not None:
            raise flaw.under("result").error_for(what, "the")
        return raw.decode()

    # ------------------------------------------------------------------------ refusing

    def _refused(self, plan: _Plan, bound: Kwargs, flaw: Flaw) -> OnwardError:
        note = plan.notes.get(first_name(flaw.path), "")
        if note:
            flaw = replace(flaw, fix=f"{flaw.fix} ({note})")
        return flaw.error_for(f"cannot enqueue {spell_call(self.name, bound)}", "argument")

    def _misfit(self, plan: _Plan, bound: Kwargs, raw: bytes, error: Exception) -> OnwardError:
        """Say why the worker could not read the call: a value bent by JSON, or a wrong type."""
        flaw = first_flaw(bound)
        if flaw is not None:
            return self._refused(plan, bound, flaw)
        path, reason = locate(plan.decoder, raw, error)
        reason = in_python(reason)
        if path in bound:
            reason = at_hand(reason, bound[path], plan.signature.parameters[path].annotation)
        return InvalidArguments(
            f"cannot enqueue {spell_call(self.name, bound)}",
            why=f"argument `{path}` does not fit its annotation: {reason}",
            fix=f"the task expects {self.name}{spell_signature(plan.signature)}",
        )

    def _result_misfit(
        self, plan: _Plan, what: str, value: object, raw: bytes, error: Exception
    ) -> OnwardError:
        flaw = unwritable(value)
        if flaw is not None:
            return flaw.under("result").error_for(what, "the")
        path, reason = locate(plan.result_decoder, raw, error)
        reason = in_python(reason)
        if not path:
            reason = at_hand(reason, value, plan.signature.return_annotation)
        declared = spell(plan.signature.return_annotation)
        where = "the value" if not path else f"`result{joined(path)}`"
        return NotSerializable(
            what,
            why=f"{where} does not fit the declared `-> {declared}`: {reason}",
            fix="correct the annotation or what the task returns",
        )


def decode_plain(text: str, name: str, *, noun: str = "arguments") -> Any:
    """Read stored arguments or a stored result of a task as plain JSON values.

    Raises:
        PayloadUnreadable: it is no JSON.
    """
    decoder = msgspec.json.Decoder(Any)
    try:
        return decoder.decode(text)
    except Exception as error:
        raise unreadable(name, _located(decoder, text, error)[1], noun=noun) from cause_of(error)


def _located(decoder: msgspec.json.Decoder[Any], text: str, error: Exception) -> tuple[str, str]:
    """Where and why a stored text does not fit."""
    if is_no_text(text):
        return "", f"it is no JSON: {text}"
    return locate(decoder, text.encode(errors="surrogatepass"), error)


# ---------------------------------------------------------------------------- the plan


class _Plan(Struct, frozen=True, kw_only=True):
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
        decoder=msgspec.json.Decoder(record, dec_hook=read_foreign),
        result_decoder=msgspec.json.Decoder(result_type, dec_hook=read_foreign),
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
        msgspec.json.Decoder(hint, dec_hook=read_foreign)
    except (TypeError, ValueError) as error:
        reason = re.split(r" - type| \(", str(error), maxsplit=1)[0]
        why = f"cannot be used to read JSON: {lower_first(reason)}"
        return Any, f"its annotation `{spell(hint)}` {why}"
    return hint, ""


def _awaited(hint: Any) -> Any:
    """`def f() -> Awaitable[int]` returns an int, as far as the task's caller is concerned."""
    origin = typing.get_origin(hint)
    awaitable = origin in (collections.abc.Awaitable, collections.abc.Coroutine)
    return typing.get_args(hint)[-1] if awaitable else hint
