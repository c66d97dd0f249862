"""The database itself: tables in SQLAlchemy Core, their migrations, what is written and how winners are chosen."""
