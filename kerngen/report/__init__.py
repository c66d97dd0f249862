"""The tuning database as a page to look at: `kerngen db report`.

facts    what databases hold, and what follows from it by arithmetic: floors, shares, today's prediction
steps    the launches of a model's step, with the times that the database has for them
svg      axes, marks and lines, as text
figures  one function a kind of figure: an SVG and the table behind it
studies  the searches once more, as Optuna's tools read them
page     everything in one HTML file that asks for nothing else
"""
