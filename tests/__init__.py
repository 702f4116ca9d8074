"""Tests of Onward. Test files import helpers as `tests.support.…`."""
