"""Quantized checkpoints, by the `quant_method` of their config.json."""
