"""Parts of scripts/gpu_bench.py."""
