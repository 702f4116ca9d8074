"""Helpers for the tests: database servers and a ledger outside the product."""
