"""Reference runtime: numpy and onnxruntime, no torch. manifest -> graphs -> KV cache -> target, drafter -> loop -> text."""
