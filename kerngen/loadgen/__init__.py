"""Puts a server of OpenAI's API under load and says how it did: for any server, ours or another's.

http.py speaks HTTP, asking.py makes requests and watches one answer, arrivals.py says when they come and runs them,
figures.py makes figures of what came, in vLLM's definitions; metrics.py reads what the server says of itself.
processes.py says what the server's processes hold. kerngen/soak asks over it, too.
"""
