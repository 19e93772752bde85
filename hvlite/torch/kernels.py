"""Faster sums of half floats than NumPy's and ml_dtypes', put into hvlite's table.

Same arithmetic and same bits: added and scaled in float32, rounded once. Measured for
two inputs of 32,768 elements on one core: see `docs/decisions`.
"""
