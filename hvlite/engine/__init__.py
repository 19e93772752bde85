"""The background thread: negotiation, fusion, execution."""
