"""Integrations of lookfar into other libraries."""
