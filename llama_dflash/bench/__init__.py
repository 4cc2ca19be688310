"""Measuring: prompts in, token ids and timings out, statistics and reports from them."""
