"""Tests of workers: embedded ones, and real processes under a supervisor."""
