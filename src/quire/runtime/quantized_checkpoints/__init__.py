"""Writes quantized checkpoints (`quire quantize`)."""
