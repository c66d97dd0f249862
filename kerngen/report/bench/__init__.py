"""What a bench measured, as a page to look at: `kerngen bench ... --report`.

runs     what a bench found, as its --json has it, read back from that or from a page
bars     plots with a row a thing: its name, and bars below
against  two runs side by side
kernel, model, profile, step   the figures of each bench
page     the page of a run, which carries the run along
"""
