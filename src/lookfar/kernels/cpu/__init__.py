"""Decoder layers on a CPU: compiled by LLVM through numba, in float32."""
