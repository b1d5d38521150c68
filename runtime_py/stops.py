"""Texts that end an answer wherever they stand in it."""

from collections.abc import Iterable

from .events import End, Event, TextDelta


class StopStrings:
    """Events in, events out, without the first of `stop` and what follows it. Text that may be the beginning of one is
    held back until that is known."""

    def __init__(self, stop: tuple[str, ...]):
        if "" in stop:
            raise ValueError("a stop text is empty; give at least one character")
        self._stop, self._held = stop, ""
        self.found = False

    def push(self, events: Iterable[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if isinstance(event, TextDelta):
                text = "" if self.found else self._text(self._held + event.text)
                passed += [TextDelta(text)] if text else []
            elif not self.found or isinstance(event, End):
                passed += [TextDelta(self._held)] if self._held else []
                passed.append(event)
                self._held = ""
        return passed

    def _text(self, text: str) -> str:
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of text begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
