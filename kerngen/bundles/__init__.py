"""Bundles: sealed files with all that a model's kernels need on a host that must not compile."""
