"""Measuring: what a target forward costs at each number of tokens, acceptance, and comparisons."""
