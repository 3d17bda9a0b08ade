"""Several methods trained, certified and attacked the same way, in one table."""
