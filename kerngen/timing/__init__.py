"""On the GPU: how long a kernel, a step and a model take."""
