"""Draft stores that replicas share through a Redis or Valkey stream."""
