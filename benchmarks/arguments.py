"""Numbers of the benchmarks' command lines."""

import argparse


def number(text: str) -> int:
    """ArgumentTypeError below 1."""
    return _from(1, text)


def numbers(text: str) -> list[int]:
    """Numbers from 1 on with commas between."""
    return [number(part) for part in text.split(",")]


def number_or_zero(text: str) -> int:
    """ArgumentTypeError below 0."""
    return _from(0, text)


def _from(least: int, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} on")
    return int(text)
