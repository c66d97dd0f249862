"""A tuning database filled by many machines: jobs in a queue of the same PostgreSQL, workers that take them.

    job      one unit of work as JSON: the problems that share compiled-in fields, what for, with which settings
    queue    the jobs in PostgreSQL: put there, watched, cancelled (Procrastinate keeps and hands them out)
    worker   takes jobs one after another and tunes; takes over what a dead worker left
    submit   plans a model's jobs, waits for them, and gathers one report

Every row goes into the tuning database as any tune's does: rows are facts and observations, so that a job that is done
twice, whole or in part, changes nothing but the clock.
"""
