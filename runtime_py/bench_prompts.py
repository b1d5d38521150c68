"""What a bench asks: built-in prompts, a kind of text each, or a file of them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

SURROGATE = re.compile("[\ud800-\udfff]")  # half a character; JSON can write it, a text cannot hold it


@dataclass(frozen=True)
class Prompt:
    """text: a user's message; a bundle without a chat template continues it."""

    kind: str
    text: str


PROMPTS = (
    Prompt("chat", "I have a free Saturday in a town by the sea and it will rain. What would you do with the day?"),
    Prompt(
        "code",
        "Write a Python function that merges two sorted lists into one sorted list, with a docstring and three asserts.",
    ),
    Prompt(
        "summary",
        "Summarize in two sentences: The lighthouse was built in 1854 after three ships had been lost on the reef in one "
        "winter. Its lamp burned whale oil, then paraffin, and since 1931 electricity. The last keeper left in 1986, when "
        "the light was made automatic, and the house is now a museum that the grandchildren of the keepers look after.",
    ),
    Prompt(
        "rewrite",
        "Rewrite this politely and correct its spelling: hey you didnt send me the reciet yet, i asked three times allready "
        "and nobody anserws. send it today or i will cancel the hole order and tell everyone about it.",
    ),
    Prompt(
        "JSON",
        'Return only JSON with the keys "name", "date", "city" and "items" (a list of objects with "title" and "price"): '
        "Maria Keller ordered a desk lamp for 39.90 and two notebooks for 4.50 each on 12 March 2024; ship to Graz.",
    ),
    Prompt(
        "translation",
        "Translate into French: The train to the mountains leaves at seven from the second platform. Please bring warm "
        "clothes, because it will be cold in the evening, and do not forget the tickets.",
    ),
)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """A JSON object with the texts "kind" and "text" on every line. ValueError names the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # other line breaks may stand within a text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 ({error})") from None
    except OSError as error:
        raise ValueError(f"--prompts {path}: cannot be read ({error.strerror}); give a text file in UTF-8") from None
    prompts = tuple(_prompt(path, i + 1, line) for i, line in enumerate(lines) if line.strip())
    if not prompts:
        raise ValueError(f'{path}: no prompts; write {{"kind": "chat", "text": "..."}}, one a line')
    return prompts


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or entry.keys() != {"kind", "text"}:
        raise ValueError(f'{path}: line {number} is {line[:60]!r}; write {{"kind": "chat", "text": "..."}}, one a line')
    for name, value in entry.items():
        if not isinstance(value, str) or not value or SURROGATE.search(value):
            raise ValueError(f"{path}: line {number}: {name} is {value!r:.80}; give a text")
    return Prompt(**entry)
