"""The demo: thousands of real jobs on real files, a worker killed in their midst, and every result
checked.

`run` is all that others need. `tasks` is what a user of Onward would write, `tour` is the course.
"""

from onward.demo.tour import run

__all__ = ["run"]
