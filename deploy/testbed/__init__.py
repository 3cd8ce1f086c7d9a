"""A Ray cluster of several hosts on one machine, with load and faults: `cachesmith testbed`."""
