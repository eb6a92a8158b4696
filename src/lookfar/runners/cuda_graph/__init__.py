"""The CUDA graph runner: flat steps captured as graphs, with tree attention and fused linear layers."""
