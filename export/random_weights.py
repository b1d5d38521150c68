"""A pair of true size without a checkpoint: the same numbers for the same seed, made where they are read.

Every tensor is cut into blocks, and a block is a piece of one pool of normal values at a place drawn for it: no two rows
are alike, nothing is held, and making numbers costs less than quantizing them.
"""

import json
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from runtime_py.manifest import RANDOM_WEIGHTS

from .checkpoint import Checkpoint, Located
from .config import drafter_config, target_config
from .weights import Weights, drafter_shapes, target_shapes

POOL, BLOCK = 1 << 23, 1 << 17  # elements
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
GENERATION = {"bos_token_id": 2, "eos_token_id": [1, 106, 50], "pad_token_id": 0}  # the official ones
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}
NAMED_TOKENS = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 50: "<|tool_response>", 105: "<|turn>", 106: "<turn|>"}
FIRST_BYTE = 238  # id of <0x00>, as in the official vocabulary


@dataclass(frozen=True)
class RandomCheckpoint(Checkpoint):
    """A checkpoint whose folder holds everything but weights."""

    seed: int = field(kw_only=True)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start..stop, bfloat16; a token ordering is int64."""
        shape = self.tensors[name].shape
        rows = range(*slice(start, stop).indices(shape[0]))
        random = np.random.Generator(np.random.PCG64([self.seed, zlib.crc32(name.encode())]))
        if name.endswith("token_ordering"):
            return torch.from_numpy(random.permutation(shape[0])[rows.start : rows.stop])
        columns = int(np.prod(shape[1:]))
        places = random.integers(0, POOL - BLOCK, -(-shape[0] * columns // BLOCK))
        first, last = rows.start * columns, rows.stop * columns
        pool, bits = _pool(self.seed), np.empty(last - first, np.uint16)
        for i in range(first // BLOCK, -(-last // BLOCK)):
            start, stop = max(first, i * BLOCK), min(last, (i + 1) * BLOCK)
            bits[start - first : stop - first] = pool[places[i] + start - i * BLOCK : places[i] + stop - i * BLOCK]
        return _scale(name, torch.from_numpy(bits).view(torch.bfloat16), columns).view(len(rows), *shape[1:])


@cache
def _pool(seed: int) -> np.ndarray:
    """[POOL] standard normal, the bits of bfloat16: numpy copies pieces of it ten times as fast as torch."""
    values = np.random.Generator(np.random.PCG64(seed)).standard_normal(POOL, np.float32)
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def _scale(name: str, values: Tensor, columns: int) -> Tensor:
    """So that every layer matters and nothing overflows: rows of linears keep a vector's size, norms are near 1."""
    if "norm" in name or name.endswith("layer_scalar"):
        values = 1 + values.clamp(-2, 2) / 8
        return values / 16 if "q_norm" in name else values  # scores of order 1
    return values.mul_(1 / 32 if "embed" in name else columns**-0.5)


@contextmanager
def random_pair(
    target: PreTrainedConfig, drafter: PreTrainedConfig, tokenizer: Path | None, seed: int = 0
) -> Iterator[tuple[Weights, Weights]]:
    """The pair of two Transformers configs with random weights.

    tokenizer: a tokenizer.json or a folder with one, whose chat template is taken too; None makes one that has a token
    for every byte. ValueError names what is wrong with it.
    """
    with TemporaryDirectory(prefix="gemma4-mtp-") as parent:
        folder = Path(parent)
        _write_texts(folder / "target", target, tokenizer)
        target_checkpoint = _checkpoint(folder / "target", target, seed)
        config = target_config(target, target_checkpoint.dtype)
        weights = Weights(_with_tensors(target_checkpoint, target_shapes(config)), config)
        _write_texts(folder / "assistant", drafter, folder / "target/tokenizer.json")
        drafter_checkpoint, config = _checkpoint(folder / "assistant", drafter, seed + 1), drafter_config(drafter)
        yield weights, Weights(_with_tensors(drafter_checkpoint, drafter_shapes(config)), config)


def _checkpoint(folder: Path, config: PreTrainedConfig, seed: int) -> RandomCheckpoint:
    return RandomCheckpoint(folder, RANDOM_WEIGHTS, f"seed {seed}", config, {}, seed=seed)


def _with_tensors(checkpoint: RandomCheckpoint, shapes: dict[str, tuple[int, ...]]) -> RandomCheckpoint:
    kinds = {name: "I64" if name.endswith("token_ordering") else "BF16" for name in shapes}
    tensors = {name: Located(checkpoint.folder, name, kinds[name], shape) for name, shape in shapes.items()}
    return replace(checkpoint, tensors=tensors)


def _write_texts(folder: Path, config: PreTrainedConfig, tokenizer: Path | None) -> None:
    """What a checkpoint's folder holds beside weights."""
    config.save_pretrained(folder)
    GenerationConfig(**GENERATION, **SAMPLING, num_assistant_tokens=6).save_pretrained(folder)
    if tokenizer is None:
        vocab = config.get_text_config().vocab_size
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(vocab)), encoding="utf-8")
        return
    source = tokenizer if tokenizer.is_dir() else tokenizer.parent
    files = {name: source / name for name in TEXT_FILES}
    if not tokenizer.is_dir():
        files["tokenizer.json"] = tokenizer
    if not files["tokenizer.json"].is_file():
        raise ValueError(f"--tokenizer {tokenizer}: no tokenizer.json; give that file or its folder")
    for name, path in files.items():
        if path.is_file():
            shutil.copyfile(path, folder / name)


def byte_tokenizer(vocab: int) -> dict:
    """tokenizer.json of `vocab` tokens: a byte each for prompts, the named ones where the official ones are."""
    names = [NAMED_TOKENS.get(i, f"<unused{i}>") for i in range(FIRST_BYTE)] + [f"<0x{b:02X}>" for b in range(256)]
    names += ["\u2581"] + [f"\u2581w{i}" for i in range(len(names) + 1, vocab)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": name} | flags for i, name in NAMED_TOKENS.items()],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "decoder": {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "vocab": {name: i for i, name in enumerate(names[:vocab])},
            "merges": [],
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
        },
    }
