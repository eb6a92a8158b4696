"""Speculation: proposals become one draft tree for each request, with as many rows as pay."""
