"""Holds .onnx files for the Java core's tests (android_demo/core/test): graphs are loaded and called through stdin and
stdout, numbers big-endian as Java's DataOutputStream writes them, tensors as they lie in memory.

Request: int -1 and the path of a model, or the number of a loaded graph with its feeds. Answer: an error, empty if there
is none, then the graph's number, or its outputs.
"""

import struct
import sys
from typing import BinaryIO

import numpy as np
import onnxruntime as ort


def main(source: BinaryIO, sink: BinaryIO) -> None:
    sessions: list[ort.InferenceSession] = []
    ort.set_global_thread_pool_sizes(1, 1)
    while header := source.read(4):
        try:
            if (index := struct.unpack(">i", header)[0]) < 0:
                sessions.append(open_model(read_text(source)))
                answer = struct.pack(">i", len(sessions) - 1)
            else:
                answer = run(sessions[index], read_feeds(source))
            sink.write(text("") + answer)
        except Exception as error:  # onnxruntime's exceptions share no base class
            sink.write(text(" ".join(str(error).split())[:1000]))
        sink.flush()


def open_model(path: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.use_per_session_threads = 4, False
    options.enable_mem_pattern = False  # as runtime_py/graph_onnx.py has it
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> bytes:
    names = [output.name for output in session.get_outputs()]
    parts = [struct.pack(">i", len(names))]
    for name, array in zip(names, session.run(names, feeds), strict=True):
        parts += [text(name), struct.pack(f">{1 + array.ndim}i", array.ndim, *array.shape), array.tobytes()]
    return b"".join(parts)


def read_feeds(source: BinaryIO) -> dict[str, np.ndarray]:
    feeds = {}
    for _ in range(read_int(source)):
        name, dtype = read_text(source), np.dtype(read_text(source))
        shape = [read_int(source) for _ in range(read_int(source))]
        feeds[name] = np.frombuffer(source.read(dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape)
    return feeds


def read_int(source: BinaryIO) -> int:
    return struct.unpack(">i", source.read(4))[0]


def read_text(source: BinaryIO) -> str:
    return source.read(struct.unpack(">H", source.read(2))[0]).decode("utf-8")


def text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack(">H", len(data)) + data


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
