"""Threads of a test's own process: one number for all tests of a backend, for it cannot be changed. Commands take more."""

THREADS = {"onnx": 1, "executorch": 1}
