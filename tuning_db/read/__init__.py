"""What a run reads: values and their ids, and which winner serves a problem.

Nothing here imports SQLAlchemy, alembic or Optuna, or what lies in `keep` and `ship`: a test forbids it.
"""
