"""Checkpoint -> configuration and a stream of tensors. A folder or hub id in the Transformers layout.

Tensors are known by canonical names (the text model's, without the prefixes that differ between text-only and
multimodal checkpoints). Every tensor of the files is expected by the graphs or stands in a named list of dropped ones.
"""

import filecmp
import json
import math
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from runtime_py.files import sha256

CONFIG_FILES = ("*.json", "*.jinja")
HUB_FILES = (*CONFIG_FILES, "*.safetensors")
FLOAT_DTYPES = ("BF16", "F16", "F32")
DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
OTHER_MODALITIES = re.compile(r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\.")
TIED_HEAD = "tied head"
KEYS_AND_VALUES = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")


@dataclass(frozen=True)
class Located:
    """A tensor in a safetensors file: dtype as that format names it."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """config: the Transformers config object. tensors: name -> place; the files' own keys until `account`, canonical
    names after it. dropped: reason -> keys left unused."""

    folder: Path
    source: str
    revision: str | None
    config: PreTrainedConfig
    tensors: dict[str, Located]
    dropped: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start..stop of a tensor in its stored dtype. The file is mapped for this read alone: pages that stay
        mapped count as resident memory."""
        place = self.tensors[name]
        try:
            with safe_open(place.file, framework="pt") as file:
                return file.get_slice(place.key)[start:stop]
        except SafetensorError as error:
            raise ValueError(f"{place.file}: changed while it was read ({error}); export again") from None

    @property
    def dtype(self) -> torch.dtype:
        """What Transformers' dtype="auto" computes in: the config's dtype, else that of the embeddings."""
        if named := self.config.dtype or self.config.get_text_config().dtype:
            return named
        stored = next(
            (place.dtype for key, place in self.tensors.items() if key.endswith("embed_tokens.weight")), "F32"
        )
        return {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored, torch.float32)


def open_checkpoint(source: str) -> Checkpoint:
    """Folder or hub id -> its config and the places of its tensors."""
    folder, revision = resolve(source)
    return Checkpoint(folder, source, revision, load_config(folder), locate_tensors(folder))


def read_config(source: str) -> PreTrainedConfig:
    """Folder or hub id -> its config alone: of a hub id nothing but the small files are downloaded."""
    return load_config(resolve(source, CONFIG_FILES)[0])


def resolve(source: str, files: tuple[str, ...] = HUB_FILES) -> tuple[Path, str | None]:
    """Folder, or hub id whose `files` are downloaded into the hub's cache -> (folder, commit hash of a hub id)."""
    if source and Path(source).is_dir():
        return Path(source), None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or Path(source).exists():
        found = "a file; give its folder" if Path(source).is_file() else "neither a folder nor a hub id (owner/name)"
        raise ValueError(f"checkpoint {source!r} is {found}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # what goes wrong for good is raised
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = Path(snapshot_download(source, allow_patterns=list(files)))
    except Exception as error:  # a connection that breaks off raises the HTTP client's own classes
        cause = str(error.__cause__ or error).strip() or type(error).__name__
        raise ValueError(
            f"checkpoint {source!r} cannot be downloaded ({cause.splitlines()[0]}); check the id, your network and HF_TOKEN, "
            "or name a local folder"
        ) from None
    return folder, folder.name


def load_config(folder: Path) -> PreTrainedConfig:
    """The Transformers config object of a folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; expected a checkpoint in the Transformers layout")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # config classes raise what they like on bad values
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a config that Transformers can build: {reason[:300]}") from None


def locate_tensors(folder: Path) -> dict[str, Located]:
    """key -> place of every tensor of model.safetensors or of the shards in its index."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file() and not single.is_file():  # both: the single file counts, as in Transformers
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
            if strange := [name for name in files if Path(name).name != name]:
                raise ValueError(strange[0])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not a safetensors index with a weight_map of file names ({error})") from None
    elif single.is_file():
        weight_map, files = None, [single.name]
    else:
        raise ValueError(f"{folder}: no model.safetensors and no model.safetensors.index.json")
    places: dict[str, Located] = {}
    for name in files:
        for place in _read_header(folder / name):
            if place.key in places:
                raise ValueError(f"{folder / name}: tensor {place.key} is also in {places[place.key].file.name}")
            places[place.key] = place
    if weight_map and (lost := sorted(key for key in weight_map if key not in places)):
        raise ValueError(
            f"{index}: tensor {lost[0]} is not in {weight_map[lost[0]]} ({len(lost)} missing); download it again"
        )
    return places


def _read_header(path: Path) -> list[Located]:
    if not path.is_file():
        raise ValueError(f"{path}: shard is missing; download the checkpoint again")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  not iterable
            return [Located(path, key, part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()]
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: truncated or not a safetensors file ({error}); download it again") from None


def account(
    checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]], first_shared: int, tied_head: bool
) -> Checkpoint:
    """Every key used once or dropped by name -> the checkpoint under canonical names. ValueError names the tensor.

    expected: canonical name -> shape. Layers from first_shared on share KV: their own K/V weights, where a checkpoint
    has them, are unused. A tied head may be repeated as lm_head.weight, if it is equal.
    """
    used: dict[str, Located] = {}
    dropped: dict[str, list[str]] = {}
    for key, place in sorted(checkpoint.tensors.items()):
        name = _canonical(key)
        if name in expected:
            if name in used:
                raise ValueError(f"{place.file}: tensors {used[name].key} and {key} are both {name}")
            used[name] = place
        elif reason := _drop_reason(key, name, first_shared, tied_head):
            dropped.setdefault(reason, []).append(key)
        else:
            raise ValueError(f"{place.file}: unknown tensor {key} {list(place.shape)}: the graphs have no use for it")
    if missing := sorted(expected.keys() - used.keys()):
        raise ValueError(
            f"{checkpoint.folder}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} missing)"
        )
    for name, place in used.items():
        _check_place(name, place, expected[name])
    accounted = replace(checkpoint, tensors=used, dropped={reason: tuple(keys) for reason, keys in dropped.items()})
    for key in accounted.dropped.get(TIED_HEAD, ()):
        if not torch.equal(checkpoint.read(key), accounted.read("embed_tokens.weight")):
            raise ValueError(
                f"{checkpoint.tensors[key].file}: tie_word_embeddings is true, but {key} differs from the embeddings"
            )
    return accounted


def _check_place(name: str, place: Located, shape: tuple[int, ...]) -> None:
    if place.shape != shape:
        raise ValueError(
            f"{place.file}: tensor {place.key} has shape {list(place.shape)}, the config needs {list(shape)}"
        )
    kinds = ("I64", "I32") if name.endswith("token_ordering") else FLOAT_DTYPES
    if place.dtype not in kinds:
        raise ValueError(f"{place.file}: tensor {place.key} is {place.dtype}, supported: {', '.join(kinds)}")


def _canonical(key: str) -> str:
    if key in HEAD_NAMES:
        return "lm_head.weight"
    if OTHER_MODALITIES.match(key):
        return key
    return next((key.removeprefix(prefix) for prefix in TEXT_PREFIXES if key.startswith(prefix)), key)


def _drop_reason(key: str, name: str, first_shared: int, tied_head: bool) -> str | None:
    if OTHER_MODALITIES.match(key):
        return "vision and audio"
    if (match := KEYS_AND_VALUES.fullmatch(name)) and int(match[1]) >= first_shared:
        return "keys and values of KV-shared layers"
    return TIED_HEAD if name == "lm_head.weight" and tied_head else None


def check_token_maps(target: Path, drafter: Path, vocab_size: int) -> bool:
    """True if both folders have a tokenizer.json and its token maps are equal; False if the drafter has none."""
    maps, theirs = [_token_map(target, vocab_size)], drafter / "tokenizer.json"
    if not theirs.is_file():
        return False
    if filecmp.cmp(target / "tokenizer.json", theirs, shallow=False):  # as is usual; 262,144 tokens take a while
        return True
    maps.append(_token_map(drafter, vocab_size))
    if maps[0] == maps[1]:
        return True
    token = min(token for token in maps[0].keys() | maps[1].keys() if maps[0].get(token) != maps[1].get(token))
    raise ValueError(
        f"wrong pair: token {token!r} is {maps[1].get(token)} in the drafter's tokenizer, {maps[0].get(token)} in the target's"
    )


def _token_map(folder: Path, vocab_size: int) -> dict[str, int]:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no tokenizer.json; expected a checkpoint in the Transformers layout")
    try:
        tokens = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{path}: not a tokenizer ({' '.join(str(error).split())[:200]}); download it again") from None
    if tokens and max(tokens.values()) >= vocab_size:
        raise ValueError(f"{path}: has token id {max(tokens.values())}, the config's vocab_size is {vocab_size}")
    return tokens


def generation_config(folder: Path, config: PreTrainedConfig) -> GenerationConfig:
    """Transformers GenerationConfig of the folder, else the one that the model's config implies."""
    if (folder / "generation_config.json").is_file():
        try:
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise ValueError(f"{folder / 'generation_config.json'}: {' '.join(str(error).split())[:300]}") from None
    return GenerationConfig.from_model_config(config)


def chat_template(folder: Path) -> str | None:
    """chat_template.jinja, or the template that older checkpoints keep in tokenizer_config.json."""
    path, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not config.is_file():
        return None
    try:
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, list):  # named templates
            template = {entry["name"]: entry["template"] for entry in template}["default"]
        if not isinstance(template, str | None):
            raise TypeError(f"chat_template is {type(template).__name__}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{config}: no chat template can be read ({type(error).__name__}: {error})") from None
    return template


def file_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """sha256 of what the bundle was made from: config, generation config and weights."""
    names = {place.file.name for place in checkpoint.tensors.values()} | {"config.json", "generation_config.json"}
    return {name: sha256(checkpoint.folder / name) for name in sorted(names) if (checkpoint.folder / name).is_file()}
