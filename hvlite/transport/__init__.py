"""Ranks that send each other messages: one protocol, over MPI and in memory."""
