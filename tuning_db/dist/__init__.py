"""Export, sealing and signing: parts of a database as files for another."""
