"""Checkpoints whose matrices are stored quantized, by the `quant_method` of their config.json."""
