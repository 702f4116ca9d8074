-- What full tables hold (S8): finished jobs, jobs for next month, and due jobs of a task that no worker knows.
WITH RECURSIVE n (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM n WHERE number < :kept)
INSERT INTO onward_finished (id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at, created_at,
                             max_attempts, max_losses, failures, losses, budget_from, args, ended_from, event, attempt_state,
                             result)
SELECT lower(hex(randomblob(16))), 'nothing', 'default', 0, 'succeeded', 1, unixepoch(), 'w', unixepoch(), unixepoch(),
       unixepoch(), 5, 3, 0, 0, 1, '{}', 'running', 'succeed', 'succeeded', 'null'
FROM n;

WITH RECURSIVE n (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM n WHERE number < :kept)
INSERT INTO onward_job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses, failures,
                        losses, budget_from, args)
SELECT lower(hex(randomblob(16))), 'benchmarks.jobs.nothing', 'default', 0, 'queued', 1, unixepoch() + 2592000 + number,
       unixepoch(), 5, 3, 0, 0, 1, '{}'
FROM n;

WITH RECURSIVE n (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM n WHERE number < :unknown)
INSERT INTO onward_job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses, failures,
                        losses, budget_from, args)
SELECT lower(hex(randomblob(16))), 'unknown', 'default', 0, 'queued', 1, unixepoch() - 3600, unixepoch(), 5, 3, 0, 0, 1, '{}'
FROM n;
