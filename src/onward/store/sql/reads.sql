-- What people and callers look at. Every read of jobs goes through the one view of the live and the cold table.

-- name: now
-- The database's clock, in seconds since the epoch.
-- sqlite
SELECT onward.clock()
-- postgres
SELECT CAST(extract(epoch FROM onward.clock()) AS float8)

-- name: job
-- One job as a decision sees it.
-- sqlite
SELECT id, task, queue, priority, state, attempt, worker, args, max_attempts, max_losses, failures, losses, budget_from,
       timeout
FROM onward.jobs WHERE id = :id
-- postgres
SELECT CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), args, max_attempts, max_losses,
       failures, losses, budget_from, timeout
FROM onward.jobs WHERE id = CAST(:id AS uuid)

-- name: record
-- One job with everything that is known of it. Times are in seconds since the epoch.
-- sqlite
SELECT id, task, queue, priority, state, attempt, worker, args, max_attempts, max_losses, failures, losses, budget_from,
       timeout, run_at, started_at, finished_at, created_at, event, reason, error, result
FROM onward.jobs WHERE id = :id
-- postgres
SELECT CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), args, max_attempts, max_losses,
       failures, losses, budget_from, timeout, CAST(extract(epoch FROM run_at) AS float8),
       CAST(extract(epoch FROM started_at) AS float8), CAST(extract(epoch FROM finished_at) AS float8),
       CAST(extract(epoch FROM created_at) AS float8), event, reason, error, result
FROM onward.jobs WHERE id = CAST(:id AS uuid)

-- name: list
-- A page of jobs, newest first, keyed by id: `:before` is the last id of the page before. Arguments, results and errors are
-- not loaded. A filter that is NULL does not filter; a name is compared as it is, so no character is a wildcard.
-- sqlite
SELECT id, task, queue, priority, state, attempt, worker, max_attempts, max_losses, failures, losses, run_at, started_at,
       finished_at, created_at, reason
FROM onward.jobs
WHERE (:before IS NULL OR id < :before) AND (:state IS NULL OR state = :state) AND (:queue IS NULL OR queue = :queue)
  AND (:task IS NULL OR task = :task)
ORDER BY id DESC LIMIT :limit
-- postgres
SELECT CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), max_attempts, max_losses, failures,
       losses, CAST(extract(epoch FROM run_at) AS float8), CAST(extract(epoch FROM started_at) AS float8),
       CAST(extract(epoch FROM finished_at) AS float8), CAST(extract(epoch FROM created_at) AS float8), reason
FROM onward.jobs
WHERE (CAST(:before AS uuid) IS NULL OR id < CAST(:before AS uuid))
  AND (CAST(:state AS text) IS NULL OR state = CAST(:state AS text))
  AND (CAST(:queue AS text) IS NULL OR queue = CAST(:queue AS text))
  AND (CAST(:task AS text) IS NULL OR task = CAST(:task AS text))
ORDER BY id DESC LIMIT :limit

-- name: ids_like
-- The ids that begin with a few characters, for people who type: the bounds are the smallest and the largest such id.
-- sqlite
SELECT id FROM onward.jobs WHERE id BETWEEN :low AND :high ORDER BY id LIMIT 5
-- postgres
SELECT CAST(id AS text) FROM onward.jobs WHERE id BETWEEN CAST(:low AS uuid) AND CAST(:high AS uuid) ORDER BY id LIMIT 5

-- name: dead
-- A page of dead jobs, newest first, each with the error of its last attempt.
-- sqlite
SELECT j.id, j.task, j.queue, j.attempt, j.failures, j.losses, j.finished_at, a.reason, substr(a.error, 1, 2000)
FROM onward.job AS j LEFT JOIN onward.attempt AS a ON a.job = j.id AND a.number = j.attempt
WHERE j.state = 'dead' AND (:before IS NULL OR j.id < :before) AND (:queue IS NULL OR j.queue = :queue)
  AND (:task IS NULL OR j.task = :task)
ORDER BY j.id DESC LIMIT :limit
-- postgres
SELECT CAST(j.id AS text), j.task, j.queue, j.attempt, j.failures, j.losses,
       CAST(extract(epoch FROM j.finished_at) AS float8), a.reason, left(a.error, 2000)
FROM onward.job AS j LEFT JOIN onward.attempt AS a ON a.job = j.id AND a.number = j.attempt
WHERE j.state = 'dead' AND (CAST(:before AS uuid) IS NULL OR j.id < CAST(:before AS uuid))
  AND (CAST(:queue AS text) IS NULL OR j.queue = CAST(:queue AS text))
  AND (CAST(:task AS text) IS NULL OR j.task = CAST(:task AS text))
ORDER BY j.id DESC LIMIT :limit

-- name: attempts
-- Every closed attempt of one job, in order.
-- sqlite
SELECT job, number, state, event, worker, started_at, ended_at, abandoned, reason, error
FROM onward.attempts WHERE job = :id ORDER BY number
-- postgres
SELECT CAST(job AS text), number, state, event, CAST(worker AS text), CAST(extract(epoch FROM started_at) AS float8),
       CAST(extract(epoch FROM ended_at) AS float8), abandoned, reason, error
FROM onward.attempts WHERE job = CAST(:id AS uuid) ORDER BY number

-- name: attempt
-- One closed attempt.
-- sqlite
SELECT job, number, state, event, worker, started_at, ended_at, abandoned, reason, error
FROM onward.attempts WHERE job = :id AND number = :number
-- postgres
SELECT CAST(job AS text), number, state, event, CAST(worker AS text), CAST(extract(epoch FROM started_at) AS float8),
       CAST(extract(epoch FROM ended_at) AS float8), abandoned, reason, error
FROM onward.attempts WHERE job = CAST(:id AS uuid) AND number = :number

-- name: refusals
-- Refused writes, newest first; of one job, or of all.
-- sqlite
SELECT job, event, attempt, worker, expected, found, found_attempt, found_worker, detail, at
FROM onward.refusal WHERE :id IS NULL OR job = :id ORDER BY id DESC LIMIT :limit
-- postgres
SELECT CAST(job AS text), event, attempt, CAST(worker AS text), expected, found, found_attempt,
       CAST(found_worker AS text), detail, CAST(extract(epoch FROM at) AS float8)
FROM onward.refusal WHERE CAST(:id AS uuid) IS NULL OR job = CAST(:id AS uuid) ORDER BY id DESC LIMIT :limit

-- name: counts
-- How many jobs are in each state.
-- both
SELECT state, count(*) FROM onward.jobs GROUP BY state

-- name: queues
-- Each queue's live jobs by state, and the age in seconds of the oldest due one.
-- sqlite
SELECT queue, state, count(*), sum(CASE WHEN state = 'queued' AND run_at <= onward.clock() THEN 1 ELSE 0 END),
       max(CASE WHEN state = 'queued' AND run_at <= onward.clock() THEN onward.clock() - run_at END)
FROM onward.job GROUP BY queue, state ORDER BY queue, state
-- postgres
SELECT queue, state, count(*), count(*) FILTER (WHERE state = 'queued' AND run_at <= onward.clock()),
       CAST(extract(epoch FROM max(onward.clock() - run_at) FILTER (WHERE state = 'queued' AND run_at <= onward.clock()))
            AS float8)
FROM onward.job GROUP BY queue, state ORDER BY queue, state

-- name: waiting_tasks
-- Which (queue, task) pairs have due jobs, and how many: held against what the live workers know.
-- both
SELECT queue, task, count(*) FROM onward.job WHERE state = 'queued' AND run_at <= onward.clock()
GROUP BY queue, task ORDER BY queue, task

-- name: finished_since
-- How many jobs ended in the last :seconds, by state.
-- sqlite
SELECT state, count(*) FROM onward.finished WHERE finished_at > onward.clock() - :seconds GROUP BY state
-- postgres
SELECT state, count(*) FROM onward.finished
WHERE finished_at > onward.clock() - CAST(:seconds AS float8) * interval '1 second' GROUP BY state

-- name: jobs_among
-- Several jobs as a decision sees them, for moves in bulk.
-- sqlite
SELECT id, task, queue, priority, state, attempt, worker, args, max_attempts, max_losses, failures, losses, budget_from,
       timeout
FROM onward.jobs WHERE id IN (SELECT value FROM json_each(:ids))
-- postgres
SELECT CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), args, max_attempts, max_losses,
       failures, losses, budget_from, timeout
FROM onward.jobs WHERE id = ANY(ARRAY(SELECT CAST(value AS uuid) FROM json_array_elements_text(CAST(:ids AS json))))

-- name: prunable
-- How many jobs one prune would take away altogether.
-- sqlite
SELECT count(*) FROM onward.finished WHERE finished_at < onward.clock() - :keep AND state = :state
-- postgres
SELECT count(*) FROM onward.finished
WHERE finished_at < onward.clock() - CAST(:keep AS float8) * interval '1 second' AND state = CAST(:state AS text)
