"""What a run reads: values and their ids, and which winner serves a problem.

Nothing here imports SQLAlchemy, alembic or Optuna, or what lies in `store` and `dist`: a test forbids it.
"""
