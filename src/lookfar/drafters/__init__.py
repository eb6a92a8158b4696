"""Drafters: sources of draft tokens, one file each, behind the interface of `base`."""
