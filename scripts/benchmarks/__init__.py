"""The commands of scripts/benchmark.py."""
