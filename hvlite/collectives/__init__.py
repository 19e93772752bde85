"""Algorithms that move and combine arrays, as steps over a channel."""
