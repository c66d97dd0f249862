"""Description to machine code: render a source, compile it with NVRTC, keep what was compiled."""
