"""The OpenAI-compatible server of `lookfar serve`. `service` and what it imports need no HTTP library."""
