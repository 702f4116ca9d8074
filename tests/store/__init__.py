"""Tests of the store: every database must show the same behaviour."""
