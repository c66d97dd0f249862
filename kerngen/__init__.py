"""kerngen: write a GPU kernel once, compile it anywhere, tune it, and run Gemma-4 with the winners."""

__version__ = "0.1.0"
