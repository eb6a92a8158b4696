"""Indexes of past text and predictions: suffix index, trie, recycle table, and the draft store that keeps them."""
