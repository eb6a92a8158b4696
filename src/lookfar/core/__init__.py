"""Types and helpers that every other package may import: arrays, draft trees, step plans, files."""
