"""Benchmarks: Onward beside the bare loop, and beside other systems. `make bench` runs them."""
