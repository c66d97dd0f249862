"""Tools of whoever works on kerngen, run from a checkout: `python -m tools.NAME --help`. Nothing here is installed.

choices       scores the defaults of today by what was timed of their problems
fit           scores the cost model against recordings, and chooses its constants anew
public_times  holds its predictions against times that others published
replay        searches on recordings, without a GPU: how soon a sampler finds the best
timeline      when the blocks of each launch of a step begin, wait, go on and end
"""
