"""Exporter: a Gemma 4 checkpoint and its MTP drafter -> quantized graphs, embedding tables and a manifest."""
