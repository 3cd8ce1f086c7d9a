"""Trains the small models whose accuracy depends on attention across chunks, on two CPU cores."""
