"""A pair with random weights as GGUF files, as llama.cpp reads them: python -m benchmarks.random_gguf GEOMETRY.json OUT TYPE.

It runs in llama.cpp's own environment: numpy and gguf. GEOMETRY.json is `{"target": .., "drafter": ..}`, the fields of
export.config's TargetConfig and DrafterConfig; OUT gets target-TYPE.gguf and drafter.gguf. Architectures `gemma4` and
`gemma4-assistant`, tensors and keys as llama.cpp's converter writes them, types as its `llama-quantize` chooses them:

| TYPE | linears | token and per-layer table | projection of the per-layer inputs | norms, scalars |
| --- | --- | --- | --- | --- |
| Q4_0 | Q4_0 | Q6_K; Q8_0 where 256 does not divide a row | BF16 | F32 |
| Q8_0 | Q8_0 | Q8_0 | BF16 | F32 |

The drafter is Q8_0 in both, and has no centroids, which llama.cpp leaves unused: its head is the whole vocabulary. The
vocabulary is made up: a token for every byte, the rest have names of their own.
"""

import json
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, TokenType

TYPES = ("Q4_0", "Q8_0")
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}  # llama.cpp's LLAMA_FTYPE_MOSTLY_*
POOL, PIECE = 1 << 18, 1 << 12  # blocks
BOS, EOS, UNK, PAD = 2, 1, 3, 0
FIRST_BYTE = 4
BLOCKS = {
    Type.Q4_0: (32, np.dtype([("scale", "<f2"), ("values", "u1", 16)])),
    Type.Q8_0: (32, np.dtype([("scale", "<f2"), ("values", "i1", 32)])),
    Type.Q6_K: (256, np.dtype([("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("scale", "<f2")])),
}
DEVIATIONS = {Type.Q4_0: 4.32, Type.Q8_0: 73.3, Type.Q6_K: 18.5}  # of the integers of a block, alike likely
SUB_SCALE = 32  # of every 16 values of a Q6_K block


@dataclass(frozen=True)
class Tensor:
    """shape [rows, columns] or [columns]"""

    name: str
    shape: tuple[int, ...]
    type: Type


def types_of(type_name: str) -> tuple[Type, Type]:
    """-> of linears, of tables"""
    return (Type.Q4_0, Type.Q6_K) if type_name == "Q4_0" else (Type.Q8_0, Type.Q8_0)


def target_tensors(target: dict, type_name: str) -> list[Tensor]:
    linear, table = types_of(type_name)
    hidden, vocab, layers = target["hidden_size"], target["vocab_size"], target["layers"]
    size = target["per_layer_input_size"]
    whole = len(layers) * size
    tensors = [
        _matrix("token_embd", vocab, hidden, table),
        _matrix("per_layer_token_embd", vocab, whole, table),
        Tensor("per_layer_model_proj.weight", (whole, hidden), Type.BF16),
        _vector("per_layer_proj_norm", size),
        _vector("output_norm", hidden),
        _vector("rope_freqs", _full_head_dim(target) // 2),
    ]
    for layer in layers:
        tensors += _attention(target, layer, linear, owns_kv=layer["donor"] == layer["index"])
        tensors += _mlp(target, layer, linear)
        name = f"blk.{layer['index']}"
        tensors += [
            _matrix(f"{name}.inp_gate", size, hidden, linear),
            _matrix(f"{name}.proj", hidden, size, linear),
            _vector(f"{name}.post_norm", hidden),
            _vector(f"{name}.layer_output_scale", 1),
        ]
    return tensors


def drafter_tensors(drafter: dict) -> list[Tensor]:
    hidden, backbone, linear = drafter["hidden_size"], drafter["backbone_hidden_size"], Type.Q8_0
    tensors = [
        _matrix("token_embd", drafter["vocab_size"], hidden, linear),
        _vector("output_norm", hidden),
        _matrix("nextn.pre_projection", hidden, 2 * backbone, linear),
        _matrix("nextn.post_projection", backbone, hidden, linear),
        _vector("rope_freqs", _full_head_dim(drafter) // 2),
    ]
    for layer in drafter["layers"]:
        tensors += _attention(drafter, layer, linear, owns_kv=False)
        tensors += _mlp(drafter, layer, linear)
        tensors.append(_vector(f"blk.{layer['index']}.layer_output_scale", 1))
    return tensors


def _attention(text: dict, layer: dict, linear: Type, owns_kv: bool) -> list[Tensor]:
    name, hidden, head = f"blk.{layer['index']}", text["hidden_size"], layer["head_dim"]
    tensors = [
        _vector(f"{name}.attn_norm", hidden),
        _vector(f"{name}.attn_q_norm", head),
        _vector(f"{name}.post_attention_norm", hidden),
        _matrix(f"{name}.attn_q", head * text["query_heads"], hidden, linear),
        _matrix(f"{name}.attn_output", hidden, head * text["query_heads"], linear),
    ]
    if owns_kv:
        tensors += [_matrix(f"{name}.attn_{w}", head * text["kv_heads"], hidden, linear) for w in "kv"]
        tensors.append(_vector(f"{name}.attn_k_norm", head))
    return tensors


def _mlp(text: dict, layer: dict, linear: Type) -> list[Tensor]:
    name, hidden, wide = f"blk.{layer['index']}", text["hidden_size"], layer["intermediate_size"]
    return [
        _vector(f"{name}.ffn_norm", hidden),
        _vector(f"{name}.post_ffw_norm", hidden),
        _matrix(f"{name}.ffn_gate", wide, hidden, linear),
        _matrix(f"{name}.ffn_up", wide, hidden, linear),
        _matrix(f"{name}.ffn_down", hidden, wide, linear),
    ]


def _matrix(name: str, rows: int, columns: int, type_: Type) -> Tensor:
    if type_ == Type.Q6_K and columns % BLOCKS[type_][0]:
        type_ = Type.Q8_0
    if columns % BLOCKS[type_][0]:
        raise ValueError(f"{name}: {columns} columns are no multiple of {BLOCKS[type_][0]}, a block of {type_.name}")
    return Tensor(f"{name}.weight", (rows, columns), type_)


def _vector(name: str, columns: int) -> Tensor:
    return Tensor(f"{name}.weight", (columns,), Type.F32)


def byte_shape(tensor: Tensor) -> tuple[int, ...]:
    """Of what is written; of quantized tensors bytes, else as it is"""
    if tensor.type not in BLOCKS:
        return tensor.shape
    columns, block = BLOCKS[tensor.type]
    return tensor.shape[0], tensor.shape[1] // columns * block.itemsize


def data(tensor: Tensor, inv_freq: list[float]) -> np.ndarray:
    """Random, the same for the same name. inv_freq: of full layers, whose zeros are the columns that do not turn."""
    random = np.random.default_rng(zlib.crc32(tensor.name.encode()))
    if tensor.name == "rope_freqs.weight":
        return np.where(np.array(inv_freq) > 0, 1, 1e30).astype(np.float32)
    if tensor.type == Type.F32:
        values = 1 + np.clip(random.standard_normal(tensor.shape), -2, 2) / 8
        return (values / 16 if "q_norm" in tensor.name else values).astype(np.float32)
    deviation = 1 / 32 if "embd" in tensor.name else tensor.shape[1] ** -0.5  # a row keeps a vector's size
    if tensor.type == Type.BF16:
        values = (random.standard_normal(tensor.shape, np.float32) * deviation).view(np.uint32)
        return (values >> 16).astype(np.uint16)
    pool = _pool(tensor.type, deviation)
    blocks = np.empty(int(np.prod(byte_shape(tensor))) // pool.itemsize, pool.dtype)
    for start in range(0, len(blocks), PIECE):
        count, place = min(PIECE, len(blocks) - start), random.integers(0, POOL - PIECE)
        blocks[start : start + count] = pool[place : place + count]
    return blocks.view(np.uint8).reshape(byte_shape(tensor))


def _pool(type_: Type, deviation: float) -> np.ndarray:
    """[POOL] blocks whose numbers have the deviation and no mean to speak of"""
    random, blocks = np.random.default_rng(int(type_)), np.empty(POOL, BLOCKS[type_][1])
    if type_ == Type.Q4_0:
        low, high = random.integers(1, 16, (2, POOL, 16), np.uint8)  # 8 stands for 0
        blocks["values"] = low | high << 4
    elif type_ == Type.Q8_0:
        blocks["values"] = random.integers(-127, 128, (POOL, 32), np.int8)
    else:
        blocks["low"] = random.integers(0, 256, (POOL, 128), np.uint8)
        blocks["high"] = random.integers(0, 256, (POOL, 64), np.uint8)
        blocks["scales"] = SUB_SCALE
        deviation /= SUB_SCALE
    blocks["scale"] = deviation / DEVIATIONS[type_]
    return blocks


def _full_head_dim(text: dict) -> int:
    return 2 * len(text["inv_freq"]["full"])


def write(path: Path, text: dict, tensors: list[Tensor], type_name: str, context: int) -> None:
    """A GGUF file of a target or a drafter."""
    part = path.with_suffix(".part")
    arch = "gemma4-assistant" if "backbone_hidden_size" in text else "gemma4"
    writer = GGUFWriter(part, arch)
    _add_keys(writer, arch, text, context)
    writer.add_file_type(FILE_TYPES[type_name])
    writer.add_quantization_version(2)
    _add_vocabulary(writer, text["vocab_size"])
    for tensor in tensors:
        dtype = np.dtype(np.float32 if tensor.type == Type.F32 else np.uint16 if tensor.type == Type.BF16 else np.uint8)
        shape = byte_shape(tensor)
        writer.add_tensor_info(tensor.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(data(tensor, text["inv_freq"]["full"]))
    writer.close()
    part.rename(path)


def _add_keys(writer: GGUFWriter, arch: str, text: dict, context: int) -> None:
    layers, freqs = text["layers"], text["inv_freq"]
    shared = sum(layer["donor"] != layer["index"] for layer in layers)
    sliding, full = 2 * len(freqs["sliding"]), _full_head_dim(text)
    numbers = {
        "context_length": context,
        "embedding_length": text["hidden_size"],
        "block_count": len(layers),
        "attention.head_count": text["query_heads"],
        "attention.head_count_kv": text["kv_heads"],
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": sliding,
        "attention.value_length_swa": sliding,
        "attention.sliding_window": text["window"],
        "attention.shared_kv_layers": shared,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": sliding,
        "embedding_length_per_layer_input": text.get("per_layer_input_size", 0),
    }
    if "backbone_hidden_size" in text:
        numbers |= {"embedding_length_out": text["backbone_hidden_size"], "nextn_predict_layers": len(layers)}
        numbers["attention.shared_kv_layers"] = len(layers)
    for name, value in numbers.items():
        writer.add_uint32(f"{arch}.{name}", value)
    writer.add_array(f"{arch}.feed_forward_length", [layer["intermediate_size"] for layer in layers])
    writer.add_array(f"{arch}.attention.sliding_window_pattern", [layer["type"] == "sliding" for layer in layers])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", text["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", _theta(freqs["full"]))
    writer.add_float32(f"{arch}.rope.freq_base_swa", _theta(freqs["sliding"]))
    if text.get("logit_softcap"):
        writer.add_float32(f"{arch}.final_logit_softcapping", text["logit_softcap"])


def _theta(inv_freq: list[float]) -> float:
    """inv_freq[i] = theta ** (-i / len)"""
    return round(inv_freq[1] ** -len(inv_freq))


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    special = {PAD: "<pad>", EOS: "<eos>", BOS: "<bos>", UNK: "<unk>"}
    tokens = [special[i] for i in sorted(special)] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [TokenType.CONTROL] * FIRST_BYTE + [TokenType.BYTE] * 256
    tokens += [f"<piece {i}>" for i in range(len(tokens), size)]
    kinds += [TokenType.NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types(kinds)
    for name, token in (("bos", BOS), ("eos", EOS), ("unknown", UNK), ("padding", PAD)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def main(geometry: str, out: str, type_name: str) -> int:
    pair = json.loads(Path(geometry).read_text(encoding="utf-8"))
    target, drafter, folder = pair["target"], pair["drafter"], Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    context = target["max_context_tokens"]
    write(folder / f"target-{type_name}.gguf", target, target_tensors(target, type_name), type_name, context)
    write(folder / "drafter.gguf", drafter, drafter_tensors(drafter), "Q8_0", context)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
