"""Small edits that tests make to copies of checkpoints and bundles, and the command lines as users call them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

REMOVED = object()


def edit_json(path: Path, changes: dict) -> None:
    """changes: "text_config/sliding_window" -> new value or REMOVED; an integer part is a list's index."""
    data = json.loads(path.read_text(encoding="utf-8"))
    for place, value in changes.items():
        *parents, last = [int(part) if part.isdecimal() else part for part in place.split("/")]
        node = data
        for part in parents:
            node = node[part]
        if value is REMOVED:
            del node[last]
        else:
            node[last] = value
    path.write_text(json.dumps(data), encoding="utf-8")


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Load model.safetensors, let `edit` change the dictionary, save it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file, {"format": "pt"})


def error_line(main: Callable[[list[str]], int], arguments: list[object], capsys: pytest.CaptureFixture) -> str:
    """The one line that a command which must fail prints on stderr; its exit code must be 2."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2, lines
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]
