"""The cost model: how long a kernel takes on a board that is not here."""
