"""JSON values as frozen records (standard library only)."""

import dataclasses
import math
import types
import typing

MAX_INTEGER = 1 << 53  # what a double holds exactly: above it sizes and their sums fit neither numpy nor a float


def decode(kind: typing.Any, value: typing.Any, where: str = "") -> typing.Any:
    """JSON value -> the annotated type, strictly: every key present, none unknown, no type bent. ValueError names `where`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, value, where)
    if origin is types.UnionType:
        return _decode_union(args, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    plain = origin is None and kind is not float and type(value) is kind  # so that true is no int, and NaN no number
    if plain and not (kind is int and abs(value) > MAX_INTEGER):
        return value
    raise ValueError(f"{where or 'the file'}: expected {getattr(kind, '__name__', kind)}, got {str(value)[:60]!r}")


def _decode_record(kind: type, value: typing.Any, where: str) -> typing.Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the file'}: expected an object, got {str(value)[:60]!r}")
    hints = typing.get_type_hints(kind)
    if missing := sorted(hints.keys() - value.keys()):
        raise ValueError(f"{where or 'the file'}: key {missing[0]!r} is missing")
    if unknown := sorted(value.keys() - hints.keys()):
        raise ValueError(f"{where or 'the file'}: unknown key {unknown[0]!r}")
    return kind(**{key: decode(hint, value[key], f"{where}.{key}".lstrip(".")) for key, hint in hints.items()})


def _decode_union(options: tuple, value: typing.Any, where: str) -> typing.Any:
    """`X | None` and `int | str`."""
    if value is None and types.NoneType in options:
        return None
    rest = [option for option in options if option is not types.NoneType]
    for option in rest:
        if dataclasses.is_dataclass(option) or type(value) is option:
            return decode(option, value, where)
    return decode(rest[0], value, where)
