"""transformers models: what can be done with one, how a step is fed to it, and where to load it from."""
