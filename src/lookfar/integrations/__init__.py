"""lookfar inside code that people already have."""
