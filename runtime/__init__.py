"""Runs Gemma-4: checkpoint loading, paged cache, forward pass, drafting and generation."""
