"""Storage: SQLite and PostgreSQL behind one narrow port. It knows how moves are written, and no
policy.
"""
