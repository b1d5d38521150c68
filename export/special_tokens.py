"""The special tokens of a checkpoint's tokenizer."""

import json
from pathlib import Path

from transformers import AutoTokenizer


def special_tokens(folder: Path, ids: dict[str, int]) -> dict[str, str]:
    """name (bos_token, image_token, ...) -> text, as Transformers' tokenizer of the folder hands them to a template.

    ids: names that the generation_config gives an id; they count where the tokenizer does not name them, for a template
    must find its bos. ValueError names the folder.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizer classes raise what they like on bad values
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder}: no tokenizer that Transformers can build: {reason[:300]}") from None
    known = {name: tokenizer.convert_ids_to_tokens(token) for name, token in ids.items()}
    return {name: text for name, text in known.items() if text is not None} | tokenizer.special_tokens_map


def skipped_texts(folder: Path) -> set[str]:
    """Texts of the tokens that a decoded answer leaves out: tokenizer.json's special ones."""
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens") or []
    return {token["content"] for token in added if token.get("special")}
