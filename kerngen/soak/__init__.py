"""Minutes of random requests, and answers held against those that their requests get alone.

Two drivers: drive.py hands requests to an engine in this process, server.py sends them to a server over HTTP, with all
that clients do wrong. faults.py is what both look for: errors, answers that part from those alone, memory that grows.

Of an engine, requests.py says what is asked and when, models.py opens the model, samples.py says how much memory it
took, drafts.py makes drafts that are sometimes right, check.py asks again one by one, report.py says what all this came
to. Of a server, kerngen/loadgen makes the requests.
"""
