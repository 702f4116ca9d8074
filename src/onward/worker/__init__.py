"""The worker, in the order data flows: listener, claimer, executor, finisher; beside them heart and
keeper; above, the supervisor.
"""
