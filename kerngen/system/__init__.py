"""What kerngen asks of the operating system: files, processes, signals, cores and a terminal."""
