"""An OpenAI-compatible server: one process runs the engine, another speaks HTTP and knows text."""
