"""Minutes of random requests, and every answer held against the one that its request gets alone.

traffic.py says what is asked and when, models.py opens what is asked, drive.py hands it to an engine and writes down
what becomes of it, samples.py how much memory it took, drafts.py makes drafts that are sometimes right, check.py asks
again one by one, report.py says what all this came to.
"""
