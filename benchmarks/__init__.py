"""Measurements of clawgym: one file a benchmark, listed in ``registry``."""
