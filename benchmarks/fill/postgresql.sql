-- What full tables hold (S8): finished jobs, jobs for next month, and due jobs of a task that no worker knows.
INSERT INTO onward.finished (id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at, created_at,
                             max_attempts, max_losses, failures, losses, budget_from, args, ended_from, event, attempt_state,
                             result)
SELECT gen_random_uuid(), 'nothing', 'default', 0, 'succeeded', 1, now(), gen_random_uuid(), now(), now(), now(),
       5, 3, 0, 0, 1, '{}', 'running', 'succeed', 'succeeded', 'null'
FROM generate_series(1, :kept);

INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses, failures,
                        losses, budget_from, args)
SELECT gen_random_uuid(), 'benchmarks.jobs.nothing', 'default', 0, 'queued', 1,
       now() + interval '30 days' + number * interval '1 second', now(), 5, 3, 0, 0, 1, '{}'
FROM generate_series(1, :kept) AS number;

INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses, failures,
                        losses, budget_from, args)
SELECT gen_random_uuid(), 'unknown', 'default', 0, 'queued', 1, now() - interval '1 hour', now(), 5, 3, 0, 0, 1, '{}'
FROM generate_series(1, :unknown);
