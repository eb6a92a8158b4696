"""Triton kernels for GPU steps, each beside a PyTorch reference with the same signature."""
