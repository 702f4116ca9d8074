"""Tests without a database or a clock: the same arguments give the same answer."""
