"""One file a question. Each prints its physical ceiling, a table and one JSON line."""
