"""One file a schema change, in versions/, numbered. A shipped one never changes."""
