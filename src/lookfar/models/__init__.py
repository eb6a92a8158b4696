"""transformers models: supported features, binding to step plans, and loading."""
