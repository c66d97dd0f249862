"""What leaves one database for another: parts of it, as files to take along."""
