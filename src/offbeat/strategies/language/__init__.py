"""Strategies as text: parsed, described, looked up by name."""
