"""Drawings as small pure functions: numbers in, markup out."""
