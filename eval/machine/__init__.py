"""The machine that it runs on: devices, memory, threads, and how long work takes there."""
