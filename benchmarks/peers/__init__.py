"""The same workloads on other systems, in turn with Onward: `python -m benchmarks.peers`."""
